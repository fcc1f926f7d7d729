"""What is wrong with a dataset as a whole, or with a row of it, in words that say what to do."""

import shlex
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from skill_train.core.errors import SkillTrainError, UsageError, from_exit_code, quoted
from skill_train.data import read_rows
from skill_train.data.check_row import HALF_A_PAIR, example_of, unread_media_in
from skill_train.data.row_pictures import PROBLEMS, RowPictures
from skill_train.program.events import Refused
from skill_train.program.examples import Row, media_in
from skill_train.program.pictures.decode import ADDRESS_HINT, HUB_HINT, PICTURE_HINT
from skill_train.program.pictures.locations import rows_named
from skill_train.program.rows import LINE_BYTES, ROWS_IN_LINES, TABLE_FILES, numbered_lines
from skill_train.program.tables.shape import is_message, old_encoding, utf16
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import ONE_MESSAGE, PICTURED, WHOLE_CHAT, DetectedFormat, answer_apart, other_turns


def empty(recipe: Recipe) -> UsageError:
    return UsageError(
        f"{recipe.data} has no rows",
        code="empty_dataset",
        expected="at least one row",
        got="an empty file" if Path(recipe.data).is_file() else f"no rows in {recipe.split}",
        hint="use another file, or another split, such as split: train",
    )


MAPPING = "in the recipe, such as format: prompt_completion and columns: {prompt: QUESTION, completion: REPLY}"
_VISION = "train a vision model on pictures (references/vision.md)"
_TEXT_OR_VISION = _VISION + ", or use a dataset of text"
ALL_ALIKE = f"no row can be used, so --fix would leave none: change them all, or name other columns {MAPPING}"

_TABLE_WITHOUT_ROW = (
    f"mend the header of the table, or the quotes around its cells, which a comma or a quote needs, or {ROWS_IN_LINES} "
    "(pandas reads a table without quotes with quoting=3 and dtype=str)"
)


def no_row(data: str) -> str:
    """The hint for a file of which no row can be read."""
    if data.lower().endswith(TABLE_FILES):
        return _TABLE_WITHOUT_ROW
    return f"{ROWS_IN_LINES}, in JSON as json.dumps of Python writes it; one JSON document is a .json file"


def open_quote(line: int) -> str:
    return f"correct the quotes at line {line}: --fix leaves out no lines that may be several rows"


def wrong_columns(recipe: Recipe, names: Collection[str], why: str) -> UsageError:
    hint = f"name them {MAPPING}"
    if is_message(names):
        why, hint = ONE_MESSAGE, WHOLE_CHAT
    if why and {"chosen", "rejected"} <= set(names):
        why = "preference pairs (chosen, rejected) are for DPO, not sft"
        hint = f"keep the chosen answers: skill-train data {quoted(recipe.data)} --fix SFT.jsonl"
    if isinstance(names, dict) and (turns := answer_apart(names) or other_turns(names)) is not None:
        why, hint = turns, WHOLE_CHAT
    path = Path(recipe.data)
    if path.is_file() and path.stat().st_size < LINE_BYTES and (command := rewriting_command(path)):
        hint = f"{command}, and {hint}"
    return UsageError(
        f"{recipe.data} cannot be used for {recipe.method}: {why}",
        code="wrong_columns",
        expected="messages | prompt, completion | text | instruction, output | question, answer | conversations",
        got=", ".join(map(str, names)) or "no columns",
        hint=hint,
    )


def media_error(
    recipe: Recipe, where: str, column: str, row: Row, *, pictures: bool, detected: DetectedFormat | None = None
) -> UsageError:
    """The error for a dataset of images, audio or video: its text alone would teach something else.

    Args:
        pictures: the model reads them, but the columns do not make an example, or one more column has some.
        detected: how its text could be read; None when it is not an example by itself.
    """
    what = f"{where} has an image, audio or video in the column {column!r}"
    got = media_in(row[column]) or repr(row[column])[:80]
    hint = _TEXT_OR_VISION if detected is None else columns_alone(detected, row)
    if pictures:
        if detected is None or "images" not in detected.columns:
            hint = f"name the columns in a recipe, such as columns: {{question: …, answer: …, images: {column}}}"
        what += ", which no format of pictures reads"
        expected = f"pictures in one column, such as `images`, beside the columns of {', '.join(PICTURED)}"
    else:
        what += ", and without a vision model only text is trained"
        expected = "a dataset of text, or a vision model for pictures"
    return UsageError(what, code="not_text", expected=expected, got=got, hint=hint)


def columns_alone(detected: DetectedFormat, row: Row) -> str:
    """The hint for rows that have one more column, with pictures, sounds or films, than training reads. The texts
    may have marks of pictures, which no text alone has."""
    import yaml

    pictured = "images" in detected.columns
    try:
        if not pictured:
            example_of(row, detected)
    except Refused as refusal:
        if refusal.error["code"] == "not_text":
            return _TEXT_OR_VISION
    columns = {"columns": detected.columns}
    text = yaml.safe_dump(columns, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    what, vision = ("them", "") if pictured else ("the text", f"{_VISION}; ")
    return f"{vision}a recipe that names the columns trains on {what} alone: format: {detected.format}, {text[1:-1]}"


def refused_row(
    recipe: Recipe, row: tuple[int, Row], detected: DetectedFormat, pictures: RowPictures | None, kind: str
) -> SkillTrainError:
    """The error for a row that training rejects.

    Args:
        row: the line, and the row.
        detected: how the rows are read. `pictures` checks the pictures of a row.
        kind: the name of the problem.
    """
    line, values = row
    where = f"line {line} of {rows_named(recipe.data, recipe.data_file)}"
    if kind == "missing_column":
        return UsageError(
            f"{where} has no column {min(detected.required - values.keys())!r}",
            code="wrong_columns",
            expected=", ".join(detected.columns.values()),
            got=", ".join(map(str, values)),
            hint=leave_out(recipe),
        )
    if kind == "not_text" and (other := unread_media_in(values, detected, pictures is not None)) is not None:
        return media_error(recipe, where, other, values, pictures=pictures is not None, detected=detected)
    try:
        example_of(values, detected, pictures)
    except Refused as refusal:
        refusal.error["message"] = f"{where}: {refusal.error['message']}"
        own = refusal.error["hint"]
        if own not in (ADDRESS_HINT, HUB_HINT) and (kind in PROBLEMS or not own):
            refusal.error["hint"] = leave_out(recipe)
        return from_exit_code(refusal.exit_code, refusal.error)
    return UsageError(
        f"{where}: {HALF_A_PAIR}",
        code="bad_row",
        expected="text in Unicode",
        got=repr(values)[:80],
        hint=leave_out(recipe),
    )


def hint_for_all(recipe: Recipe, detected: DetectedFormat | None, pictures: RowPictures | None) -> str:
    """The hint if training takes no row at all: the hint of the first row's refusal, or else `ALL_ALIKE`."""
    rows = (row for _, row, _ in read_rows.read(recipe) if isinstance(row, dict))
    try:
        if detected is not None and (row := next(rows, None)) is not None:
            example_of(row, detected, pictures)
    except Refused as refusal:
        own = refusal.error["hint"]
        return ALL_ALIKE if own == PICTURE_HINT else own or ALL_ALIKE
    return ALL_ALIKE


THE_RECIPE = "--recipe RECIPE"
_TELLING_BYTES = 1 << 20


def leave_out(recipe: Recipe) -> str:
    """The command that lists all such rows and writes the others. The mapping may be in a recipe file that is not known
    here."""
    split = ["--split", recipe.split] if recipe.split != Recipe.split else []
    split += ["--model", recipe.model] if recipe.model and Path(recipe.model).is_dir() else []
    split += ["--max-length", str(recipe.max_length)] if recipe.max_length != Recipe.max_length else []
    fixed = read_rows.free_name(Path(recipe.data))
    if recipe.format or recipe.columns:
        words = shlex.join([recipe.data, *split, "--fix", fixed])
        return f"leave such rows out, with the recipe that has the mapping: skill-train data {THE_RECIPE} {words}"
    return shlex.join(["skill-train", "data", recipe.data, *split, "--fix", fixed])


def rewriting_command(path: Path) -> str | None:
    """The `iconv` command that converts the whole file to UTF-8; None if it would damage rows that already are UTF-8,
    or if a line is too long for a row.

    If some other lines are UTF-8 beyond ASCII, the file was joined from two files, and no single command repairs it.
    """
    encoding = None
    if path.is_file() and path.suffix != ".parquet":
        with suppress(Refused):
            encoding = _encoding(path)
    new = path.with_name(f"{path.stem}.utf8{path.suffix}")
    return f"iconv -f {encoding} -t UTF-8 {quoted(path)} > {quoted(new)}" if encoding else None


def _encoding(path: Path) -> str | None:
    with open(path, "rb") as file:
        if (encoding := utf16(file.read(1 << 16))) is not None:
            return encoding
    beyond, size = list[bytes](), 0  # enough of them to tell
    for _, line in numbered_lines(path):
        ascii_only = line.isascii()
        if b"\0" in line or (not ascii_only and _decodes(line, "utf-8")):
            return None
        if not ascii_only and (size < _TELLING_BYTES or not _decodes(line, "windows-1252")):
            beyond.append(line)
            size += len(line)
    return old_encoding(b"".join(beyond)) if beyond else None


def _decodes(line: bytes, encoding: str) -> bool:
    try:
        line.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True
