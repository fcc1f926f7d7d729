"""A hint or a `next` can be pasted into a shell: whatever a path or a value of the user holds, it is one word."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import planning
import shared_runs
from one_command import answered

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "skill" / "skill_train"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SAID = ("hint", "next")
QUOTING = ("join", "quote", "quoted")

# What stands in a hint as it is, by its module: it was quoted before, or is a command, an option, a number, an id of
# the Hub (letters, digits, - _ .), or a word of a sentence or of a line of a recipe, which no shell reads.
KNOWN: dict[str, set[str]] = {
    "cli": {"field"},
    "commands._planning": {"elsewhere", "first.hint", "larger"},
    "commands._of_hub": {"named[0]"},
    "commands._job_snapshot": {"word"},
    "commands._command": {"command"},
    "commands._submit_answer": {"word.format(name)"},
    "commands._submit_elsewhere": {"option", "task['name']"},
    "commands.cancel": {"cloud.word", "command"},
    "commands.data": {"ONLY_SFT.partition(';')[0]", "first.lines[0]", "name"},
    "commands.evaluate": {"word"},
    "commands._export": {"asked"},
    "commands._export_answer": {"quant_option(kind) or ' --mix FILE'", "target"},
    "commands.logs": {"'wait' if cloud.now.live else 'status'", "cloud.word"},
    "commands.pull": {"'wait' if cloud.now.live else 'resume'", "word"},
    "commands.resume": {"bigger.name", "cloud.word", "command", "now.name"},
    "commands.status": {"words"},
    "core.errors": {"extra"},
    "commands.verify": {"step"},
    "commands.wait": {"state.cloud.word", "timeout or 0"},
    "cloud.budget": {"command", "enough"},
    "run.cloud_record": {"continue_words(read(run), _backend(run))"},
    "cloud.find_run": {"job_id", "namespace", "word"},
    "commands._spent": {"job_id", "namespace", "word"},
    "cloud.elsewhere.colab": {"FLAVOR"},
    "data.errors": {"MAPPING", "ROWS_IN_LINES", "column", "command", "detected.format", "hint", "text[1:-1]"},
    "hub.dataset_card": {"available[0]", "names[0]"},
    "hub.repositories": {"name", "option"},
    "hub.dataset_library": {"resource.page"},
    "hub.datasets": {"more", "named[0]"},
    "hub.errors": {"again", "pause", "place", "right or 'this permission'", "resource", "resource.page", "sign_in()"},
    "cloud.failure_reason": {"again", "bigger.name", "word"},
    "plan.launch_args": {"there", "unit"},
    "program.folders.checkpoints": {"otherwise"},
    "program.pictures.processor": {"OWN_FILE", "WHOLE_FILE"},
    "program.watch": {"again()", "anew"},
    "train.local": {"error.hint", "layout_words(smaller['placement'])"},
    "merge.step": {"adapter.config.get('base_model_name_or_path') or 'adapter_config.json does not name it'"},
    "plan.file": {"again", "command", "others[0]"},
    "plan.refusals": {"context"},
    "cloud.preflight": {"_TOKENS", "sign_in()", "account.name", "name.split('/')[1]", "option"},
    "cloud.pull": {"command"},
    "commands.push": {"mend"},
    "publish.files": {"again", "step"},
    "gguf.mix_file": {"options or '--quant auto --bits 4.5'", "size"},
    "gguf.quantize_worker": {"_other_types(name)"},
    "recipe.fields": {"'the default' if FIELDS[key].default is None else FIELDS[key].default", "data", "key"},
    "report.artifacts": {"options"},
    "report.figure": {"words"},
    "gguf.quantize": {"or_another_out(record)", "other"},
    "run.folder": {"or_another_out(path)"},
    "run.lock": {"otherwise"},
    "cloud.elsewhere.skypilot": {"VERSION", "back", "follow", "name", "stop"},
    "llama.get_converter": {"FETCH_COMMAND"},
    "program.events": {"again()"},
    "program.cloud.job": {"again()"},
    "program.cloud.push": {"repo"},
    "program.model": {"close[0]", "part"},
    "program.trainer": {"config.max_position_embeddings"},
    "program.pictures.tokens": {"len(ids)", "name"},
    "program.model_files": {"key"},
    "program.rows": {"encoding"},
    "program.split": {"max(cut)"},
}  # fmt: skip


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def hints(tree: ast.AST) -> Iterator[ast.JoinedStr]:
    """Texts with values in them that are a hint, or begin as a command of ours."""
    for node in ast.walk(tree):
        value: ast.AST | None = None
        if isinstance(node, ast.keyword) and node.arg in SAID:
            value = node.value
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {name for target in targets for name in _dotted(target)}
            value = node.value if {*SAID, "following", "again"} & names else None
        elif isinstance(node, ast.JoinedStr) and str(getattr(node.values[0], "value", "")).startswith("skill-train "):
            value = node
        yield from (one for one in ast.walk(value) if isinstance(one, ast.JoinedStr)) if value else ()


def _dotted(target: ast.expr) -> list[str]:
    """The names in `error.hint`."""
    if isinstance(target, ast.Attribute):
        return [*_dotted(target.value), target.attr]
    return [target.id] if isinstance(target, ast.Name) else []


def unquoted(source: str, module: str = "") -> list[str]:
    """The values in such texts that are neither quoted nor known to need no quotes."""
    texts = hints(ast.parse(source))
    parts = [part.value for text in texts for part in text.values if isinstance(part, ast.FormattedValue)]
    return sorted({ast.unparse(part) for part in parts if not _is_quoted(part)} - KNOWN.get(module, set()))


def _is_quoted(part: ast.expr) -> bool:
    return isinstance(part, ast.Call) and ast.unparse(part.func).rpartition(".")[2] in QUOTING


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: _name(path))
def test_every_value_in_a_hint_is_one_word(path: Path) -> None:
    assert unquoted(path.read_text(encoding="utf-8"), _name(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        'f(hint=f"read {path}")',
        'f(next=[f"skill-train verify {run.path}"])',
        'f(hint="no" if a else f"move {out / name} away")',
        'following = [f"skill-train evaluate {run_dir}"]',
        'error.hint = f"see {log}"',
        'g([f"skill-train pull {path}"])',
    ],
)
def test_the_rule_sees_a_value_without_quotes(source: str) -> None:
    assert len(unquoted(source)) == 1
    assert unquoted('f(hint=f"read {shlex.quote(str(path))}", next=[f"skill-train verify {quoted(path)}"])') == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: _name(path))
def test_no_remark_in_brackets_follows_a_command(path: Path) -> None:
    """A shell that gets `skill-train demo   (tells …)` runs nothing, and reports a syntax error."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [text for text in texts if text.startswith("   (") or re.search(r"^\w[^\n]*   \(", text)] == []


NAME = 'it\'s "a" run; $HOME `x`'


@pytest.mark.parametrize(
    "words",
    [
        ("export-gguf", "RUN"), ("merge", "RUN"), ("verify", "RUN"), ("evaluate", "RUN"), ("push", "RUN"),
        ("status", "RUN"), ("wait", "RUN"), ("pull", "RUN"), ("logs", "RUN"), ("resume", "RUN"), ("cancel", "RUN"),
        ("report", "RUN", "--out", "RUN"), ("plan", "RUN", "--max-steps", "5"),
        ("data", "RUN/plan.json", "--fix", "RUN/new.csv"), ("data", "RUN/broken.jsonl"),
        ("local", "RUN/rows.csv"),
    ],
)  # fmt: skip
def test_a_folder_of_any_name_is_one_word_of_what_is_told(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Of a run that was planned and not trained."""
    run = tmp_path / NAME
    run.mkdir()
    (run / "broken.jsonl").write_text('{"text": "a"}\n{')
    (run / "rows.csv").write_text("text\na\n")
    plan = json.dumps(planning.decided("smollm2-135m", "m2_pro_16gb", data=str(run / "rows.csv")))
    (run / "plan.json").write_text(plan)
    arguments = [word.replace("RUN", str(run)) for word in (*words, "--format", "json")]
    program = [sys.executable, "-c", "from skill_train.cli import main; main()", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    answer: dict[str, Any] = json.loads(done.stdout)
    told = [line for line in (*answer["next"], answer.get("error", {}).get("hint", "")) if "$HOME" in line]
    assert told, answer
    for line in told:
        assert line.count("$HOME") == sum(word.count(NAME) for word in shlex.split(line)), line


def test_a_hint_names_the_run_that_was_given(tmp_path: Path) -> None:
    """The steps below a command do not know how the user called the run, and write RUN."""
    run = tmp_path / NAME
    shutil.copytree(shared_runs.chain().run, run)
    code, answer = answered("evaluate", str(run), "--gguf", "none.gguf")
    assert (code, answer["error"]["code"]) == (2, "missing_file")
    assert answer["next"] == [answer["error"]["hint"]] == [f"skill-train export-gguf {shlex.quote(str(run))}"]
    code, answer = answered("export-gguf", str(run), "--quant", "q2_k_xl")
    assert code == 2 and answer["error"]["hint"].startswith(f"skill-train export-gguf {shlex.quote(str(run))} --quant ")
    code, answer = answered("chat", str(tmp_path / "none.gguf"), "--prompt", "a")
    assert (code, answer["error"]["hint"]) == (2, "skill-train export-gguf RUN")
