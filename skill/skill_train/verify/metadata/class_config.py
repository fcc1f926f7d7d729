"""A config.json as transformers' class reads it, which knows the values that the file leaves out."""

from typing import Any

from skill_train.facts import JsonObject


def class_config_of(config: JsonObject) -> Any:
    """The config as an object of transformers' class; None where there is no class for this model type, or it refuses
    the values."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    own = {key: _numbers(value) for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        return CONFIG_MAPPING[kind].from_dict(own)
    except Exception:  # noqa: BLE001 - what a class of another library raises for old keys is not documented
        return None


def _numbers(value: Any) -> Any:
    """The value with infinity as a number. transformers 5 writes it as `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_numbers(element) for element in value]
    if isinstance(value, dict):
        return (
            float(value["__float__"]) if value.keys() == {"__float__"} else {k: _numbers(v) for k, v in value.items()}
        )
    return value
