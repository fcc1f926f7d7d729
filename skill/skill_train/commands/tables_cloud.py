"""What a person sees of two runs side by side, and of a run on machines of others."""

from __future__ import annotations

from typing import Any

from skill_train.core.console import clean


def draw_diff(rich: Any, data: dict[str, Any]) -> None:
    """The differences of recipe and placement, and how far the results are apart."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"two runs: {data['verdict']}", title_justify="left")
    for column in ("group", "fact", "run A", "run B"):
        table.add_column(column, overflow="fold")
    for group, style in (("recipe", "red"), ("placement", "")):
        for each in data[group]:
            cells = (group, each["fact"], str(each["a"]), str(each["b"]))
            table.add_row(*(Text(clean(cell)) for cell in cells), style=style)
    if table.row_count:
        rich.print(table)
    counts = data["counts"]
    differ = f"{counts['recipe']} of the recipe differ, {counts['placement']} of the placement"
    rich.print(f"{counts['compared']} facts compared: {differ}")
    if data["losses"] is not None:
        losses = data["losses"]
        far = f"differ by up to {losses['largest_difference']:.3g} (step {losses['at_step']})"
        rich.print(f"losses of {losses['steps']} steps: {'equal' if losses['equal'] else far}")
    if data["same_weights"] is not None:
        rich.print(f"trained weights: {'the same bytes' if data['same_weights'] else 'other bytes'}")


def draw_elsewhere(rich: Any, data: dict[str, Any]) -> None:
    """A task or a notebook: where it lies, what it asks for, and how it goes on."""
    lines = [f"run directory: {data['run_dir']}"]
    if "notebook" in data:
        lines += [f"notebook: {data['notebook']}, for a {data['gpu']}"]
    else:
        asked = data["resources"]
        lines += [f"task: {data['task']}, {data['nodes']} x {asked['accelerators']}"]
        lines += [f"machines of: {', '.join(place['infra'] for place in asked['any_of'])}"]
        lines += [f"training is ended after {data['timeout_seconds'] / 3600:.2f} h; all is kept in {data['kept_in']}"]
    lines += [f"result: the repository {data['hub_model_id']}", data["how"]]
    for line in lines:
        rich.print(clean(line), markup=False, soft_wrap=True)
