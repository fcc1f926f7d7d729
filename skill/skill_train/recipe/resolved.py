"""The resolved recipe: every open choice is made. A plan contains it, and the training program reads it."""

import msgspec

OF_PICTURES = ("images", "lora_parts", "preprocess", "min_pixels", "max_pixels")


class ResolvedRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `Recipe` that affect the training. recipe/fields.py explains them.

    Fields with a default were added after the first plans had been written.
    """

    model: str
    revision: str | None = None
    data: str
    data_revision: str | None = None
    data_config: str | None = None
    split: str = "train"
    format: str
    columns: dict[str, str]
    loss_on: str
    method: str = "sft"
    finetuning_type: str = "lora"
    pure_bf16: bool = False
    max_length: int
    max_steps: int
    effective_batch_size: int
    learning_rate: int | float
    lr_scheduler_type: str
    warmup_steps: int
    weight_decay: int | float
    adam_beta1: int | float
    adam_beta2: int | float
    adam_epsilon: int | float
    max_grad_norm: int | float
    optim: str
    lora_r: int
    lora_alpha: int | float
    lora_dropout: int | float
    target_modules: list[str]
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    load_in_4bit: bool = False
    held_out_fraction: int | float
    skip_untrained_rows: bool = False
    seed: int
    images: bool = False
    lora_parts: list[str] | None = None
    preprocess: str = "model"
    min_pixels: int | None = None
    max_pixels: int | None = None
    data_file: str | None = None

    @property
    def is_full(self) -> bool:
        """Whether every weight trains, without an adapter."""
        return self.finetuning_type == "full"

    def as_dict(self) -> dict[str, object]:
        """The fields by name, as in `plan.json`. A recipe of text leaves out the fields of pictures, and `data_file` is
        left out if it is not set, so that the hash is the same as in earlier versions."""
        unread = () if self.images else OF_PICTURES
        fields = msgspec.structs.asdict(self).items()
        return {name: v for name, v in fields if name not in unread and (name != "data_file" or v is not None)}
