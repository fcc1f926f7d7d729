"""Which part of a vision model a module belongs to, by its name."""

import re

# Where the modules of transformers lie: Qwen has the projector, which it calls merger, in the tower.
PROJECTOR = re.compile(r"(?:^|\.)(?:visual\.(?:merger|deepstack_merger_list)|multi_modal_projector|connector)(?:\.|$)")
TOWER = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model)(?:\.|$)")


def vision_part(module: str) -> str:
    """The part of a vision model that a module belongs to: `language`, `projector` or `tower`."""
    return "projector" if PROJECTOR.search(module) else "tower" if TOWER.search(module) else "language"
