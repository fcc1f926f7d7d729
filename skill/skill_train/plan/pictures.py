"""What a plan says of pictures: whether and how they are read, and how many tokens stand for them. Pure."""

from skill_train.core.errors import UsageError, refusals
from skill_train.facts import DatasetFacts, ModelFacts
from skill_train.model.tower import trains_on_pictures
from skill_train.program.pictures.processor import limited_processor
from skill_train.recipe.fields import Recipe
from skill_train.recipe.preprocess import preprocess_of
from skill_train.run.plan_record import Reason


def pictures_of(recipe: Recipe, model: ModelFacts, dataset: DatasetFacts, reasons: list[Reason]) -> dict[str, object]:
    """Whether and how pictures are read, and which parts of a vision model get an adapter.

    Raises:
        UsageError: no row has a picture that the recipe asks for, or the family has no such limit.
    """
    images = bool(dataset.images) if recipe.images is None else recipe.images
    if not images:
        _require_language_alone(recipe)
        if recipe.images is None and dataset.rows_read is not None and trains_on_pictures(model):
            later = "the training refuses a later one"
            if recipe.columns:
                later = "one in a column that the recipe does not name is not read"
            why = f"none in the first {dataset.rows_read} of {dataset.rows} rows; {later}"
            reasons.append(Reason("images", "unknown", why, dataset.source))
        unread = {"lora_parts": None, "preprocess": "model", "min_pixels": None, "max_pixels": None}
        return {"images": False, **unread}
    if not dataset.images and dataset.rows_read is None:
        raise UsageError(
            "the recipe says images: true, and no row has a picture",
            code="bad_recipe",
            expected="rows with a column images, or with pictures in their messages",
            got=", ".join(dataset.column_names),
            hint="remove images from the recipe, or name the column: columns: {images: COLUMN}",
        )
    if not dataset.images and recipe.columns and "images" not in recipe.columns:
        raise UsageError(
            f"the recipe says images: true, but its columns name no pictures, and the first {dataset.rows_read} rows "
            "have none",
            code="bad_recipe",
            expected="columns with images, or no columns",
            got=f"columns: {', '.join(recipe.columns)}",
            hint="name the column: columns: {images: COLUMN}; or remove columns, then rows with pictures are read or "
            "refused; or remove images, then the text alone is trained",
        )
    what = f"{dataset.images} pictures, and {model.architecture} reads them"
    if not dataset.images:
        what = f"the recipe says so; none of the first {dataset.rows_read} of {dataset.rows} rows has a picture"
    reasons.append(Reason("images", "True", what, dataset.source))
    parts = recipe.lora_parts
    if parts is None and recipe.finetuning_type == "lora":
        parts = ["language"]
        why = "the usual one: the tower sees well already, and few pictures teach it little"
        reasons.append(Reason("lora_parts", ", ".join(parts), why, "references/vision.md"))
    if "projector" in (parts or ()) and model.model_type == "gemma3" and recipe.finetuning_type == "lora":
        raise UsageError(  # its one matrix is a parameter of its own
            "the projector of this model has no linear layer for an adapter",
            code="no_such_target",
            expected="language, tower",
            got="projector",
            hint="remove projector from lora_parts, or train it whole: modules_to_save: [multi_modal_projector]",
        )
    preprocess = preprocess_of(recipe, model.model_type)
    reasons.append(Reason("preprocess", preprocess.value, preprocess.because, "references/vision.md"))
    reasons.append(_tokens(recipe, model, dataset))
    return {"images": True, "lora_parts": parts, "preprocess": preprocess.value}


def _require_language_alone(recipe: Recipe) -> None:
    """Refuses parts that only pictures train. Full fine-tuning reads no parts."""
    seeing = [part for part in recipe.lora_parts or () if part != "language"]
    if seeing and recipe.finetuning_type == "lora":
        raise UsageError(
            f"lora_parts names {', '.join(seeing)}, and this run reads no pictures",
            code="bad_recipe",
            expected="rows with pictures, or lora_parts: [language]",
            got=f"lora_parts {recipe.lora_parts}, images {recipe.images}",
            hint="remove lora_parts from the recipe; for rows with pictures, images: true and their column in columns",
        )


def _tokens(recipe: Recipe, model: ModelFacts, dataset: DatasetFacts) -> Reason:
    """The tokens of a picture, or why they are unknown.

    Raises:
        UsageError: the recipe has a limit that the family does not have.
    """
    source = "preprocessor_config.json"
    if model.image_processor is None:
        why = model.unknown.get("image_processor", "nobody looked at the model's files")
        return Reason("picture tokens", "unknown", why, source)
    with refusals():
        limited_processor(model.image_processor, recipe.min_pixels, recipe.max_pixels)
    tokens = dataset.picture_tokens
    if tokens is None:
        return Reason("picture tokens", "unknown", "no picture was looked at", source)
    value = f"{tokens.least}" if tokens.least == tokens.most else f"{tokens.least} to {tokens.most}"
    why = f"by the sizes of the pictures; those of a row take {tokens.mean:.0f} on average, at most {tokens.longest}"
    return Reason("picture tokens", value, why, source)
