"""Types with no importance matrix, with one of the model's own data and with one of foreign text, and mixes of types.

    python bench/quantize/measure.py                     trains the model, measures, writes results.json and the page
    python bench/quantize/measure.py --model FOLDER      on a model that `model.py FOLDER` has made
    python bench/quantize/measure.py --page              only writes the tables of the page

The divergence is that of the file from its f16 file, in nats a token, on conversations that nothing else has seen: of
three seeds, each with its own figure. Mixes get the size of a file of llama.cpp, and are chosen on other conversations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))
import model as trained  # noqa: E402
import side  # noqa: E402

from skill_train.gguf.quality.distance import Judge, distance, judging  # noqa: E402
from skill_train.llama.gguf_header import read_gguf  # noqa: E402

TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k", "iq2_xs")
NEED_MATRIX = ("iq3_xxs", "iq2_xs")
SAME_SIZE = ("q5_k_m", "q4_k_m", "q3_k_m")  # the sizes of the mixes
STEPS, SEED = 400, 0
OWN_SEED, HELD_OUT_SEEDS = 1000, (2000, 2001, 2002)
COMPUTED_TOKENS, HELD_OUT_TOKENS = 12_000, 1_500
MARKS = ("<!-- table -->", "<!-- /table -->")
TARGET = "auto at q4_k_m's size: KL"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder that model.py has made")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.page:
        with tempfile.TemporaryDirectory(prefix="skill-train-bench-quantize-") as folder:
            measure(Path(folder), options.model)
    write_page()


def measure(work: Path, folder: Path | None) -> None:
    from transformers import AutoTokenizer

    if folder is None:
        folder = work / "model"
        trained.write_model(folder, steps=STEPS, seed=SEED)
    source = _converted(folder, work)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    own = trained.own_texts(tokenizer, OWN_SEED, COMPUTED_TOKENS)
    foreign = trained.foreign_texts(tokenizer, COMPUTED_TOKENS)
    held_out = [trained.own_texts(tokenizer, seed, HELD_OUT_TOKENS) for seed in HELD_OUT_SEEDS]
    other = trained.own_texts(tokenizer, OWN_SEED + 1, HELD_OUT_TOKENS)
    matrices = {name: _matrix(source, texts, work / name) for name, texts in (("own", own), ("foreign", foreign))}
    rows = []
    with contextlib.ExitStack() as stack:
        vocabulary = len(read_gguf(source).strings("tokenizer.ggml.tokens"))
        judges = [stack.enter_context(judging(source, texts, vocabulary, _quiet)) for texts in held_out]
        for quant in TYPES:
            for name, matrix in (("none", None), *matrices.items()):
                if matrix is None and quant in NEED_MATRIX:
                    continue
                file = _quantized(source, quant, matrix, work / f"{quant}-{name}")
                rows.append(_row(quant, name, file, judges))
        stock = {row["type"]: row for row in rows if row["matrix"] == "none"}
        for quant in SAME_SIZE:
            started = time.monotonic()
            file, mix = _mixed(source, stock[quant]["bytes"], matrices["own"], (own, other), work / "mixes")
            seconds = round(time.monotonic() - started, 1)
            rows.append({**_row(f"auto, {quant}'s size", "own", file, judges), **mix, "seconds": seconds})
    document = side.circumstances("quantize", len(HELD_OUT_SEEDS), side.PACKAGES)
    document |= {
        "about": "types, importance matrices and mixes of types on a model of 10M weights that is trained here",
        "model": json.loads((folder / trained.MADE).read_text(encoding="utf-8")),
        "seeds": {"model": SEED, "own data": OWN_SEED, "held out": HELD_OUT_SEEDS},
        "tokens": {"of a matrix": COMPUTED_TOKENS, "held out, of each seed": HELD_OUT_TOKENS},
        "rows": rows,
        "targets": targets(rows),
    }
    (HERE / "results.json").write_text(json.dumps(document, indent=1) + "\n")


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {(row["type"], row["matrix"]): row["mean_kl"] for row in rows}
    ratio = found["auto, q4_k_m's size", "own"] / found["q4_k_m", "none"]
    against = found["auto, q4_k_m's size", "own"] / found["q4_k_m", "own"]
    why = f"{against:.2g} of q4_k_m's with a matrix of the same data"
    return [side.target(TARGET, "at most half of q4_k_m's", round(ratio, 3), 0.5, "x", why)]


def _converted(folder: Path, work: Path) -> Path:
    import subprocess

    from skill_train.llama import get_converter

    file, converter = work / "model-f16.gguf", get_converter.find_or_fetch().folder / "convert_hf_to_gguf.py"
    command = side.python(converter, folder, "--outfile", file, "--outtype", "f16")
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    return file


def _matrix(source: Path, texts: list[list[int]], out: Path) -> Any:
    from skill_train.gguf import importance
    from skill_train.gguf.quality.texts import RunTexts

    out.mkdir()
    digest = out.name.encode().hex().ljust(64, "0")
    request = importance.MatrixRequest(
        source, RunTexts(texts, [], digest, "all", out.name), out / "imatrix.gguf", out / "imatrix.json"
    )
    importance.compute_matrix(request, progress=_quiet)
    return importance.matrix_of(request.file, source, _say)


def _quantized(source: Path, quant: str, matrix: Any, out: Path) -> Path:
    from skill_train.gguf import quantize

    request = quantize.QuantizeRequest(source, out, out / "quantize.json", "model", [quant], matrix=matrix)
    quantize.quantize(request, progress=_quiet, warn=_say)
    return out / f"model-{quant}.gguf"


def _mixed(source: Path, most: int, matrix: Any, texts: tuple[Any, Any], out: Path) -> tuple[Path, dict[str, Any]]:
    from skill_train.gguf import mix, quantize
    from skill_train.gguf.quality.texts import RunTexts

    out.mkdir(exist_ok=True)
    target = mix.MixTarget(most_bytes=most)
    both = RunTexts(*texts, "f" * 64, "all")
    chosen = mix.choose_mix(mix.MixRequest(source, target, matrix, both, out / mix.FILE), _quiet)
    request = quantize.QuantizeRequest(
        source, out, out / "quantize.json", "model", [], matrix=matrix, mixes={target.name: chosen}
    )
    made = quantize.quantize(request, progress=_quiet, warn=_say)
    [entry] = [each for each in made.record.outputs.values() if each["quant"] == target.name]
    counts = {kind: list(chosen.types.values()).count(kind) for kind in sorted(set(chosen.types.values()))}
    figures = {"estimated_kl": entry["mix"]["estimated_kl"], "measurements": entry["mix"]["measured_pairs"]}
    return out / f"model-{target.name}.gguf", {"mixed_of": counts, **figures}


def _row(quant: str, matrix: str, file: Path, judges: list[Judge]) -> dict[str, Any]:
    found = [distance(judge, file) for judge in judges]
    kls, size = [each["mean_kl"] for each in found], file.stat().st_size
    print(f"{quant} {matrix}: {size:,} bytes, KL {statistics.mean(kls):.3g}", file=sys.stderr, flush=True)
    return {
        "type": quant,
        "matrix": matrix,
        "bytes": size,
        "mean_kl": statistics.mean(kls),
        "kl_of_seeds": kls,
        "same_top1": round(statistics.mean(each["same_top1"] for each in found), 4),
    }


def write_page() -> None:
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    page = HERE / "README.md"
    before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text(f"{before}{MARKS[0]}\n{tables(results)}\n{MARKS[1]}{after}", encoding="utf-8")


def tables(results: dict[str, Any]) -> str:
    """The rows as a table of types and matrices, and one of mixes."""
    rows = {(row["type"], row["matrix"]): row for row in results["rows"]}
    lines = ["| type | size | KL without a matrix | own data | foreign text |", "| --- | --: | --: | --: | --: |"]
    for quant in TYPES:
        cells = [_cell(rows.get((quant, name))) for name in ("none", "own", "foreign")]
        lines.append(f"| {quant} | {rows[quant, 'own']['bytes'] / 1e6:.2f} MB | {' | '.join(cells)} |")
    lines += ["", "| mix | size | KL | of the stock type's, without | with own data | sum of single matrices | types |"]
    lines.append("| --- | --: | --: | --: | --: | --: | --- |")
    for quant in SAME_SIZE:
        row = rows[f"auto, {quant}'s size", "own"]
        ratios = [f"{row['mean_kl'] / rows[quant, name]['mean_kl']:.2f} x" for name in ("none", "own")]
        types = ", ".join(f"{count} {kind}" for kind, count in row["mixed_of"].items())
        sizes = f"{row['bytes'] / 1e6:.2f} MB | {_cell(row)}"
        lines.append(f"| {row['type']} | {sizes} | {' | '.join(ratios)} | {row['estimated_kl']:.2g} | {types} |")
    [target] = results["targets"]
    verdict = "met" if target["met"] else "**not met**"
    lines += ["", f"Target: {target['name']} {target['target']}: {target['measured']} x, {verdict} ({target['why']})."]
    machine, versions, made = results["hardware"], results["versions"], results["model"]
    loss = "" if made["loss"] is None else f", loss {made['loss']} nats"
    lines.append(
        f"The model: {made['parameters'] / 1e6:.1f} million weights, {made['steps']} steps{loss}. "
        f"{results['date']}; {machine['processor']}, {machine['cores']} cores; "
        f"llama-cpp-python {versions['llama-cpp-python']}."
    )
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "cannot be made"
    kls = row["kl_of_seeds"]
    return f"{row['mean_kl']:.2g} ({min(kls):.2g} to {max(kls):.2g})"


def _quiet(done: float, total: float, text: str) -> None:
    """A bar that nobody sees."""


def _say(code: str, message: str) -> None:
    print(f"{code}: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
