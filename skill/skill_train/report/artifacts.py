"""The sections about results: the proof, the files, the pairs of a model and a projector, and how to run and make them.

Pure.
"""

import re
from collections import Counter
from collections.abc import Iterator

from skill_train.core.errors import quoted
from skill_train.core.units import dollars
from skill_train.estimate.artifacts import BITS
from skill_train.report import views
from skill_train.report.figure import Figure, ReportedRun, Shown
from skill_train.report.quality import measured
from skill_train.report.words import nats, number, ratio, share, size
from skill_train.run.cloud_record import continue_words
from skill_train.run.export_record import ExportedFile, size_option
from skill_train.run.verify_record import Check

_WORST = ("fail", "unknown", "warn", "pass")


def missing(run: ReportedRun) -> list[views.MissingPart]:
    """Each part without a record, and the command that makes it."""
    steps = (
        ("train", "trained", continue_words(run.cloud, run.backend)),
        ("convert", "exported", "export-gguf"),
        ("verify", "verified", "verify"),
        ("evaluate", "evaluated", "evaluate"),
    )
    return [
        {"part": part, "said": _missing(run, part, done), "command": run.command(words)}
        for part, done, words in steps
        if not (run.is_exported if part == "convert" else run[part])
    ]


def _missing(run: ReportedRun, part: str, done: str) -> str:
    return f"{done}, but other files than these" if part in run.outdated else f"not {done} yet"


def quant_of(run: ReportedRun, file: str) -> str:
    step, name = run.exported().get(file, ("", ""))
    return str(run[step].get("outputs", name, "quant", default=file)) if step else file


def proof(run: ReportedRun) -> views.ProofView | None:
    """The proof: a table with a row for each check and a column for each file, and the list of all checks."""
    if run.proof is None:
        return None
    verify, files = run["verify"], list(run.proof.inputs.ggufs)
    checks: list[views.CheckView] = [
        {
            "name": check.name,
            "file": check.file,
            "verdict": check.verdict,
            "figure": verify.figure(number, "checks", i, "figure", unknown=""),
            "threshold": verify.figure(number, "checks", i, "threshold", unknown=""),
            "detail": check.detail,
        }
        for i, check in enumerate(run.proof.checks)
    ]
    by_place = {(check["name"], check["file"]): check for check in checks}
    names = dict.fromkeys(check.name for check in run.proof.checks)
    return {
        "files": [(file, quant_of(run, file)) for file in files],
        "rows": [(name, [by_place.get((name, file)) for file in files]) for name in names],
        "checks": checks,
        "not_checked": run.proof.not_checked,
        "samples": [(name, verify.figure(number, "samples", name)) for name in run.proof.samples],
    }


def files(run: ReportedRun) -> list[views.FileView]:
    """Each exported file with its size, distance to the trained model, speed and verdict; the largest first."""
    views = [_file(run, file, step, name) for file, (step, name) in run.exported().items()]
    return sorted(views, key=lambda file: -(file["bytes"].value or 0))


def _file(run: ReportedRun, file: str, step: str, name: str) -> views.FileView:
    verify = run["verify"]
    own = checks_of(run, file)
    logits = next((i for i, check in own if check.name == "logits"), "none")
    quant = quant_of(run, file)

    def compared(key: str, text_of: Shown) -> Figure:
        return verify.figure(text_of, "checks", logits, "figures", key, unknown="not verified")

    return {
        "file": file,
        "path": name,
        "quant": quant,
        "bytes": run[step].figure(size, "outputs", name, "bytes"),
        "bits": run[step].figure(number, "outputs", name, "bits_per_weight", unknown=""),
        "verdict": worst([check.verdict for _, check in own]),
        "mean_kl": compared(_to_trained([check for _, check in own]), nats),
        "same_top1": compared("same_top1", share),
        "perplexity": compared("perplexity_ratio", ratio),
        "half_width": compared("perplexity_ratio_half_width", nats),
        "exact_match": measured(run, file, "exact_match", stage=quant),
        "speed": measured(run, file, "tokens_per_second", stage=quant),
        "fallbacks": len(run[step].get("outputs", name, "fallbacks", default=[])),
        "made": _how_made(run[step].get("outputs", name, default={})),
    }


def _how_made(exported: ExportedFile) -> list[str]:
    """Sentences about the importance matrix of a quantized file, and about its mix of types."""
    sentences = []
    if use := exported.get("imatrix"):
        sentences.append(f"with the importance matrix {use['file']} of {use['data']}")
    if choice := exported.get("choice"):
        kls = [choice[each]["mean_kl"] for each in ("with_matrix", "without_matrix")]
        sentences.append(f"KL to the unquantized file {nats(kls[0])} with the matrix, {nats(kls[1])} without")
    if measured := exported.get("measured"):
        kinds = Counter(exported.get("tensor_types", {}).values()).most_common()
        mixed = ", ".join(f"{count} {kind}" for kind, count in kinds)
        sentences.append(f"a mix of {mixed}; KL to the unquantized file {nats(measured['mean_kl'])}")
    if source := exported.get("replayed"):
        sentences.append(f"the types of the mix are those of {source['mix'] or 'a list'} in {source['file']}")
    return sentences


def _to_trained(checks: list[Check]) -> str:
    """The name of the figure with the distance from the trained model. Earlier versions have only `mean_kl`."""
    has_trained_kl = any("trained_kl" in check.figures for check in checks if check.name == "logits")
    return "trained_kl" if has_trained_kl else "mean_kl"


def smallest(run: ReportedRun) -> list[Figure]:
    """Type and size of the smallest file that passes its checks. If there is a projector, it must pass too."""
    passing = [file for file in files(run) if verdict_to_run(run, file) == "pass"]
    if not passing:
        return [Figure("none yet")]
    step, name = run.exported()[passing[-1]["file"]]
    return [run[step].figure(str, "outputs", name, "quant"), passing[-1]["bytes"]]


def worst(verdicts: list[str]) -> str:
    """The worst of the verdicts; `unknown` if there are none. `unknown` is worse than a warning."""
    return min(verdicts, key=_WORST.index, default="unknown")


def checks_of(run: ReportedRun, file: str) -> list[tuple[int, Check]]:
    """The checks of one file, and their places in the proof; empty if the proof is of another file of this name."""
    checks = run.proof.checks if run.proof is not None and run.is_proof_of(file) else ()
    return [(i, check) for i, check in enumerate(checks) if check.file == file]


def pairs(run: ReportedRun) -> list[views.PairView]:
    """Each language model with the projector, and their verdicts; empty without a projector."""
    return [pair for file in run.exported() for pair in _pair(run, file)]


def no_projector(run: ReportedRun) -> str:
    """A sentence if the model was trained on pictures and no exported file reads pictures; otherwise empty."""
    if not run["plan"].get("recipe", "images") or not run.exported() or run.projectors():
        return ""
    return f"The model was trained on pictures, and these files read text only: {run.command('export-gguf')}"


def verdict_to_run(run: ReportedRun, file: views.FileView) -> str:
    """The verdict of everything that has to run: the file alone, or the file and its projector together."""
    return worst([pair["verdict"] for pair in _pair(run, file["file"])]) if run.projectors() else file["verdict"]


def _pair(run: ReportedRun, file: str) -> list[views.PairView]:
    model, found = _judged(run, file), list[views.PairView]()
    was_asked = any(check.name == "pictures" for _, check in checks_of(run, file))
    for projector, (projector_step, projector_name) in run.projectors().items():
        other = _judged(run, projector)
        together = worst([model, other])
        found.append(
            {
                "model": file,
                "quant": quant_of(run, file),
                "model_verdict": model,
                "projector": projector,
                "path": projector_name,
                "projector_quant": str(run[projector_step].get("outputs", projector_name, "quant", default="")),
                "bytes": run[projector_step].figure(size, "outputs", projector_name, "bytes"),
                "projector_verdict": other,
                "verdict": together if was_asked or together == "fail" else "unknown",
            }
        )
    return found


def _judged(run: ReportedRun, file: str) -> str:
    """The verdict of one file; `unknown` if the proof is of another file of this name."""
    if run.proof is None or file not in run.proof.inputs.ggufs:
        return "unknown"
    return worst([check.verdict for _, check in checks_of(run, file)])


def run_it(run: ReportedRun) -> views.RunItView | None:
    """The commands that run the smallest file that passed, or else the smallest, with its projector if there is one.
    Paths are relative to the run's folder."""
    listed = files(run)
    if not listed:
        return None
    passed = [file for file in listed if verdict_to_run(run, file) in ("pass", "warn")]
    chosen = (passed or listed)[-1]
    name = re.sub(r"[^a-z0-9._-]+", "-", run.name.lower()).strip("-._") or "model"
    path = quoted(chosen["path"])
    modelfile = run.texts.get("Modelfile")
    named = re.search(r"^FROM (.*)", modelfile or "", re.IGNORECASE | re.MULTILINE)
    other = named is not None and chosen["file"] not in named[1]
    mind = f"its FROM names another file: write ./{chosen['file']} there first; " if other else ""
    projector, where = next(((file, quoted(path)) for file, (_, path) in run.projectors().items()), (None, ""))
    return {
        "file": chosen["file"],
        "projector": projector,
        "quant": chosen["quant"],
        "verdict": verdict_to_run(run, chosen),
        "commands": _commands(name, path, mind) if projector is None else _commands_of_pair(name, path, where, mind),
        "modelfile": modelfile,
    }


def _commands(name: str, path: str, modelfile: str) -> list[views.ProgramView]:
    """The commands for each program. `modelfile`: what to change in the Modelfile first, or empty.

    `lms import` moves the file unless `--copy` is given (lmstudio-ai/lms src/subcommands/importCmd.ts, 2026-08). The
    other commands are from references/gguf_conversion.md.
    """
    return [
        {
            "program": "Ollama",
            "lines": [f"ollama create {name} -f gguf/Modelfile", f"ollama run {name}"],
            "mind": f"{modelfile}the Modelfile has no TEMPLATE: one would replace the file's own.",
        },
        {
            "program": "LM Studio",
            "lines": [f"lms import --copy {path}"],
            "mind": "without --copy the file is moved away from the run. The prompt template must be the model's own.",
        },
        {
            "program": "llama.cpp",
            "lines": [f"llama-cli -m {path} -cnv", f"llama-server -m {path}"],
            "mind": "it renders the template in the file: the one that was verified.",
        },
    ]


def _commands_of_pair(name: str, path: str, projector: str, modelfile: str) -> list[views.ProgramView]:
    """The commands that load a language model and its projector, from references/vision.md."""
    both = f"-m {path} --mmproj {projector}"
    return [
        {
            "program": "llama.cpp",
            "lines": [f"llama-server {both}", f"llama-mtmd-cli {both} --image FILE -p QUESTION"],
            "mind": "without --mmproj it reads text only. It resizes pictures in its own way: pictures_as_used.",
        },
        {
            "program": "LM Studio",
            "lines": [f"lms import --copy --user-repo PUBLISHER/MODEL {file}" for file in (path, projector)],
            "mind": "both files must lie in one folder; lms import moves a file away without --copy.",
        },
        {
            "program": "Ollama",
            "lines": [f"ollama create {name} -f gguf/Modelfile", f"ollama run {name}"],
            "mind": f"{modelfile}the Modelfile names both files. Whether Ollama then reads pictures depends on family "
            "and version.",
        },
    ]


def cloud(run: ReportedRun) -> views.CloudView | None:
    """The Hub jobs of a run in the cloud: ids, states, flavors and costs, and the place of their results."""
    if run.cloud is None:
        return None
    record = run["cloud"]
    jobs: list[views.JobView] = [
        {
            "number": record.figure(number, "jobs", i, "number"),
            "state": job.stage or job.state,
            "cost": record.figure(dollars, "jobs", i, "cost_usd"),
            "job_id": record.figure(str, "jobs", i, "job_id"),
            "url": job.url if (job.url or "").startswith("https://") else None,
            "flavor": record.figure(str, "jobs", i, "flavor"),
            "price": record.figure(lambda usd: f"{dollars(usd)}/h", "jobs", i, "usd_per_hour"),
            "timeout": record.figure(lambda s: f"{s / 3600:.3g} h", "jobs", i, "timeout_seconds"),
            "asked_at": job.asked_at,
        }
        for i, job in enumerate(run.cloud.jobs)
    ]
    fields = [("bucket", "bucket"), ("folder", "folder"), ("repository", "hub_model_id"), ("run", "run_id")]
    return {"jobs": jobs, "kept": [(label, record.figure(str, key)) for label, key in fields]}


def versions(run: ReportedRun) -> list[tuple[str, Figure]]:
    """The versions of the packages that trained, merged, converted and verified; each package once."""
    environment = run["environment"]
    figures = {key: environment.figure(str, key) for key in ("python", "platform", "device_name")}
    figures |= {str(name): environment.figure(str, "versions", str(name)) for name, _ in environment.items("versions")}
    for step in ("merge", "convert", "quantize", "verify", "evaluate"):
        for name, _ in run[step].items("versions"):
            figures.setdefault(str(name), run[step].figure(str, "versions", str(name)))
    return [(name, figure) for name, figure in figures.items() if figure.value is not None]


def reproduce(run: ReportedRun) -> views.ReproduceView:
    """The commands that repeat this run from its recipe, and the fingerprints that show whether the inputs are the
    same."""
    plan = run["plan"]
    lines = ["skill-train local recipe.yaml --run-dir again", f"{run.command('diff')} again"]
    if exports := dict.fromkeys(_exports(run)):
        lines += [*(f"skill-train export-gguf again {options}" for options in exports), "skill-train verify again"]
    prints = [(str(name), plan.figure(str, "fingerprints", str(name))) for name, _ in plan.items("fingerprints")]
    revision = plan.figure(str, "recipe", "revision", unknown="none: a folder; its fingerprint says which")
    return {"lines": lines, "fingerprints": [*prints, ("revision of the model", revision)]}


def _exports(run: ReportedRun) -> Iterator[str]:
    """The options of `export-gguf` that make the files again: one command for all types with the same importance
    matrix, and one for each mix."""
    outputs: dict[str, ExportedFile] = {
        path: run[step].get("outputs", path) for file in files(run) for step, path in [run.exported()[file["file"]]]
    }
    mixes = {file["quant"]: file["tensor_types"] for file in outputs.values() if "tensor_types" in file}
    types: dict[str, list[str]] = {}
    for file in outputs.values():
        if file["quant"] not in mixes:
            types.setdefault(_matrix_option(run, file), []).append(file["quant"])
    for matrix, quants in types.items():
        yield f"--quant {quoted(','.join(dict.fromkeys(quants)))}{matrix}"
    for file in outputs.values():
        if file["quant"] in mixes:
            yield _mix_option(run, file, mixes) + _matrix_option(run, file)


def _matrix_option(run: ReportedRun, file: ExportedFile) -> str:
    """The option for the importance matrix; empty for the default, a matrix that was computed from the run's rows."""
    if "imatrix" not in file:
        return "" if "choice" in file or BITS.get(file["quant"], 0) >= BITS["q6_k"] else " --imatrix none"
    sources = [source["sha256"] for source in run["quantize"].get("inputs", default={}).values()]
    return "" if file["imatrix"]["model"] in sources else f" --imatrix {quoted(file['imatrix']['file'])}"


def _mix_option(run: ReportedRun, file: ExportedFile, mixes: dict[str, dict[str, str]]) -> str:
    """The size that a mix was chosen for. A replayed mix is read from `quantize.json` if that has it under a size."""
    if "replayed" not in file:
        return f"--quant auto{size_option(file['quant'])}"
    same = [name for name, types in mixes.items() if types == file["tensor_types"]]
    sizes = [""] if len(same) == len(mixes) else [option for name in same if (option := size_option(name))]
    if sizes:
        return f"--mix {quoted(f'{run.call}/quantize.json')}{sizes[0]}"
    return f"--mix {quoted(file['replayed']['file'])}{size_option(file['replayed']['mix'])}"
