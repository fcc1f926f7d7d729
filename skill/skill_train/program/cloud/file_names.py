"""Names of the files that a job leaves in its bucket and in the repository."""

from collections.abc import Mapping

from skill_train.program.plan import SMALLER

MARKER = "kept.json"  # in a folder of a bucket, once everything that it lists is there
PROOF = "training.json"  # in the repository, while it has no result
# Fields of train.json in the repository, which others may read. `example` and `answer` hold rows of the data.
PUBLISHED = {
    "schema", "step", "run", "recipe_hash", "steps", "verdict", "outputs", "saved_dtype", SMALLER, "checks", "data",
    "figures", "seconds", "finished_at",
}  # fmt: skip


def result_names(method: str) -> set[str]:
    """File names of a result. Before the training, the repository is asked whether it accepts them."""
    whole = {"config.json", "tokenizer_config.json", "model.safetensors", "model-00001-of-00002.safetensors"}
    own = whole if method == "full" else {"adapter_config.json", "adapter_model.safetensors"}
    return own | {"README.md", "train.json", "environment.json", "recipe.json", "tokenizer.json"}


def without_rows(record: Mapping[str, object]) -> dict[str, object]:
    """`train.json` as it is pushed. The folder of the run has the whole record."""
    return {key: value for key, value in record.items() if key in PUBLISHED}
