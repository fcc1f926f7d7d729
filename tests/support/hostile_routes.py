"""What a hostile Hub may do at each of its routes, while a command uses it.

A `Story` is a command with what must be there for it. Played once without trouble it shows which routes of the
emulator's table it uses; then each `Trouble` strikes each of them. The short form, for values of single fields, is
`hostile_hub`.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import cloud_runs
import hostile
import hostile_records
from command_child import Commands, Done
from elsewhere import Elsewhere
from hub_emulator import ALWAYS, Fault, Hub, JobFault, Lie, server
from hub_emulator.routes import ROUTES
from hub_emulator.wire import Answer
from hub_models import add_model
from skill_train.core.files import write_json
from skill_train.run.folder import RunDir

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "me/rows"
IMPATIENT = {
    "TEST_PATIENCE_SECONDS": "1",
    "TEST_REQUEST_SECONDS": "1.5",
    "TEST_IN_VAIN_SECONDS": "2",
    "TEST_SETTLED_SECONDS": "0.2",
    "TEST_CANCEL_SECONDS": "2",
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",
    "HF_XET_CLIENT_READ_TIMEOUT": "2s",
    "HF_XET_CLIENT_CONNECT_TIMEOUT": "2s",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
MOST_SECONDS, DEAD_SECONDS = 25.0, 30.0  # of one command; then the process for the commands is ended
MOST_GROWTH = 700 << 20  # of the resident memory of that process, by one command
CODES = {0, 2, 3, 4, 5, 6, 8}
# What is known and not mended yet: a pattern of the failure, and why. One that is met no more is a failure too.
KNOWN: dict[str, str] = {}
_CONTROL = "\x1b[2J\x1b]0;x\x07\u202e\x9b31m\x00\r"


@dataclass(frozen=True)
class Twisted(Fault):
    """The right answer, and what it asks for done; but something is wrong with how it comes.

    Attributes:
        twist: makes the wrong answer of the right one.
        share: of its bytes that are sent before the connection is closed.
    """

    twist: Callable[[Answer], Answer] = lambda answer: answer
    share: float = 1.0

    @property
    def lets_through(self) -> bool:
        return True


_plain_send = server._Handler._send


def _send(handler: Any, answer: Answer, fault: Fault) -> None:
    if not isinstance(fault, Twisted):
        return _plain_send(handler, answer, fault)
    answer = fault.twist(answer)
    if fault.share == 1.0 or not isinstance(answer.body, bytes):
        return _plain_send(handler, answer, fault)
    handler.send_response(answer.status)
    for name, value in ({"Content-Length": str(len(answer.body))} | answer.headers).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(answer.body[: int(len(answer.body) * fault.share)])
    handler.wfile.flush()
    handler.close_connection = True
    return None


server._Handler._send = _send  # type: ignore[method-assign]


# --- Troubles ---


@dataclass(frozen=True)
class Trouble:
    """One way to go wrong; `fault` makes it from the dice and the address of another host."""

    name: str
    fault: Callable[[random.Random, str], Fault]
    times: int = 1
    slow: bool = False


def _body(content: bytes | Callable[[], Iterator[bytes]], kind: str = "application/json", status: int = 200) -> Any:
    """Another body, without the work of the route."""

    def made(dice: random.Random, elsewhere: str) -> Fault:
        said = content if isinstance(content, bytes) else cast(bytes, content())
        return Lie(status, {"Content-Type": kind}, said)

    return made


def _of_right(change: Callable[[Any, random.Random], Any]) -> Callable[[random.Random, str], Fault]:
    """The JSON of the right answer changed; an answer that is no JSON has it in its place."""

    def made(dice: random.Random, elsewhere: str) -> Fault:
        def twist(answer: Answer) -> Answer:
            if not isinstance(answer.body, bytes):
                return Answer(_changed_events(answer.body, change, dice), answer.headers, answer.status)
            try:
                document = json.loads(answer.body)
            except ValueError:
                document = {}
            body = json.dumps(change(document, dice)).encode()
            return Answer(body, answer.headers, answer.status)

        return Twisted(twist=twist)

    return made


def _changed_events(events: Iterator[bytes], change: Any, dice: random.Random) -> Iterator[bytes]:
    """Of a log: each line of data is a JSON document."""
    for event in events:
        found = re.fullmatch(rb"data: (.*)\n\n", event, re.DOTALL)
        try:
            yield b"data: " + json.dumps(change(json.loads(found[1]), dice)).encode() + b"\n\n" if found else event
        except ValueError:
            yield event


def _strings(value: Any, how: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _strings(one, how) for key, one in value.items()}
    if isinstance(value, list):
        return [_strings(one, how) for one in value]
    return how(value) if isinstance(value, str) else value


def _mutated(document: Any, dice: random.Random) -> Any:
    return hostile.edited(document, dice.randbytes(4 * dice.choice((1, 1, 2, 4))))


def _redirect(status: int, location: str) -> Callable[[random.Random, str], Fault]:
    return lambda dice, elsewhere: Fault(status, {"Location": location or elsewhere})


def _cut(share: float) -> Callable[[random.Random, str], Fault]:
    return lambda dice, elsewhere: Twisted(share=share)


def _headers(**more: str) -> Callable[[random.Random, str], Fault]:
    def twist(answer: Answer) -> Answer:
        return Answer(answer.body, answer.headers | {k.replace("_", "-"): v for k, v in more.items()}, answer.status)

    return lambda dice, elsewhere: Twisted(twist=twist)


def _endless() -> Iterator[bytes]:
    """For longer than anyone should wait. A thread that is left behind goes on reading, so it is not much."""
    yield b'{"x": "'
    for _ in range(150):
        time.sleep(0.1)
        yield b" " * 2_000_000


HTML = b"<!doctype html><html><head><title>Sign in \x1b[2J</title></head><body>To the Wi-Fi</body></html>"
LARGE = b"[" + b"0," * 15_000_000 + b"0]"
_NOTHING = b" " * 400


def _hangs(dice: random.Random, elsewhere: str) -> Fault:
    return Fault(seconds=12)


def _drips(dice: random.Random, elsewhere: str) -> Fault:
    return Fault(200, {"Content-Type": "application/json"}, b"[" + _NOTHING, drop_seconds=0.2)


def _errors(status: int) -> Trouble:
    words = json.dumps({"error": f"no {_CONTROL} way", "message": _CONTROL}).encode()
    headers = {
        "X-Error-Message": "no \x1b[31m\x07 way \x9b31m",
        "X-Error-Code": "\x1b[2JGatedRepo",
        "X-Request-Id": "\x1b[2J",
    }
    return Trouble(f"{status} with control characters", lambda dice, elsewhere: Fault(status, headers, words))


TROUBLES: tuple[Trouble, ...] = (
    Trouble("hang", _hangs, slow=True),
    Trouble("drip", _drips, slow=True),
    Trouble("no end", _body(_endless), slow=True),
    Trouble("another host, 302", _redirect(302, "")),
    Trouble("another host, 307", _redirect(307, "")),
    Trouble("a ring, 302", _redirect(302, "?again=1")),
    Trouble("a ring, 308", _redirect(308, "?again=1")),
    Trouble("a redirect to nothing", _redirect(302, "http://[")),
    Trouble("a redirect to a file", _redirect(307, "file:///etc/passwd")),
    Trouble("a page of HTML", _body(HTML, "text/html")),
    Trouble("HTML that says it is JSON", _body(HTML)),
    Trouble("nothing", _body(b"")),
    Trouble("204", _body(b"", status=204)),
    Trouble("null", _body(b"null")),
    Trouble("a list", _body(b"[]")),
    Trouble("an object", _body(b"{}")),
    Trouble("a list of lists", _body(b"[[1]]")),
    Trouble("a number", _body(b"5")),
    Trouble("a text", _body(b'"x"')),
    Trouble("digits", _body(b'{"id": ' + b"9" * 5000 + b"}")),
    Trouble("NaN", _body(b"NaN")),
    Trouble("deep", _body(b"[" * 100_000)),
    Trouble("no text", _body(b"\xff\xfe\x00{")),
    Trouble("200 with an error", _body(b'{"error": "something \\u001b[2J went wrong"}')),
    Trouble("30 MB", _body(LARGE)),
    Trouble("a bomb of gzip", lambda dice, elsewhere: Lie(200, {"Content-Encoding": "gzip"}, _bomb())),
    Trouble("no gzip", _headers(Content_Encoding="gzip")),
    Trouble("another type", _headers(Content_Type="image/png; charset=\x1b[2J")),
    Trouble("a strange charset", _headers(Content_Type="application/json; charset=utf-7")),
    Trouble("a long header", _headers(X_Long="x" * 60_000)),
    Trouble("a next page that is this one", _headers(Link='<?cursor=0>; rel="next"')),
    Trouble("cut in half", _cut(0.5)),
    Trouble("cut at once", _cut(0.0)),
    Trouble("control characters in each text", _of_right(lambda d, dice: _strings(d, lambda text: text + _CONTROL))),
    Trouble("only control characters", _of_right(lambda d, dice: _strings(d, lambda text: _CONTROL))),
    Trouble("names that lead out", _of_right(lambda d, dice: _strings(d, lambda text: "../../../" + text))),
    Trouble("half a pair", _of_right(lambda d, dice: _strings(d, lambda text: text + "\ud800"))),
    Trouble("long texts", _of_right(lambda d, dice: _strings(d, lambda text: text + "x" * 100_000))),
    Trouble("every key twice as deep", _of_right(lambda d, dice: {"value": d})),
    Trouble("other values", _of_right(_mutated), times=6),
    *(_errors(status) for status in (400, 401, 403, 404, 409, 418, 500)),
)


def _bomb() -> bytes:
    return gzip.compress(bytes(64 << 20), 9)


# --- Stories ---


@dataclass(frozen=True)
class Story:
    """A command, and the run that it is called for.

    Attributes:
        run: `running`, `finished`, `failed`, `local` or none.
        makes: it asks for a job, so it is called once more when the trouble is over.
    """

    name: str
    words: tuple[str, ...]
    run: str = ""
    makes: bool = False


_SAID = ("--model", MODEL, "--data", DATA, "--max-steps", "2", "--flavor", "t4-small")
_ROWS = (*_SAID[:2], "--data", "rows.jsonl", *_SAID[4:])
STORIES = (
    Story("plan", ("plan", *_SAID[:-2], "--where", "cloud", "--out", "made.json")),
    Story("data", ("data", DATA)),
    Story("submit", ("submit", *_SAID, "--run-dir", "new", "--yes"), makes=True),
    Story("submit rows", ("submit", *_ROWS, "--run-dir", "new", "--yes"), makes=True),
    Story("status", ("status", "run"), "running"),
    Story("logs", ("logs", "run"), "failed"),
    Story("wait", ("wait", "run", "--timeout", "1"), "running"),
    Story("cancel", ("cancel", "run"), "running"),
    Story("pull", ("pull", "run"), "finished"),
    Story("status of the end", ("status", "run"), "failed"),
    Story("resume", ("resume", "run", "--yes"), "failed", makes=True),
    Story("push", ("push", "run", "--repo", "me/tuned"), "local"),
    Story("status by id", ("status", "me/{job}"), "running"),
)  # fmt: skip


@dataclass(frozen=True)
class Play:
    """One input: a story, with a trouble at one of its routes, and which of several."""

    story: Story
    route: tuple[str, str]
    trouble: Trouble
    number: int

    def __str__(self) -> str:
        return f"{self.story.name}, {self.route[0]} {self.route[1]}, {self.trouble.name}, {self.number}"


_numbering = threading.Lock()  # the runs are made with ids that are constants for other tests


@dataclass
class Desk:
    """A Hub and a process for commands, which play one input after the other.

    Attributes:
        ended: how many ended how.
    """

    folder: Path
    ended: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.home = self.folder / "home"
        self.hub = Hub(self.folder / "hub").__enter__()
        self.hub.jobs.grace_seconds = 0.1
        self.hub._server.handle_error = lambda *who: None  # type: ignore[method-assign]  # clients go in the midst
        self.elsewhere = Elsewhere()
        self.commands = Commands(self.hub.environment(self.home) | IMPATIENT)
        self.job: dict[str, str] = {}
        self._runs()
        self._jobs, self._buckets = list(self.hub.jobs.all), copy.deepcopy(self.hub.buckets)
        self._begun = 0

    def _runs(self) -> None:
        """A run of each kind: its folder, its job, and what that keeps in the bucket."""
        with _numbering:
            self._runs_of_kinds()
        shutil.move(hostile_records.make_run(self.folder / "made"), self.folder / "local")

    def _runs_of_kinds(self) -> None:
        first = cloud_runs.RUN_ID, cloud_runs.FOLDER
        sleep = "import time; print('begun', flush=True); time.sleep(1500)"
        for number, (kind, program) in enumerate(
            (("running", sleep), ("finished", "print('done')"), ("failed", "raise SystemExit(5)"))
        ):
            cloud_runs.RUN_ID, cloud_runs.FOLDER = f"{number}" * 12, f"20261121T100000-{number}"
            run = RunDir(self.folder / kind)
            write_json(run.plan, cloud_runs.plan())
            cloud = cloud_runs.Cloud(self.hub, run)
            files = {"plan.json": run.plan.read_bytes(), "metrics.jsonl": cloud_runs.metrics(4)}
            files |= cloud_runs.result() if kind == "finished" else {}
            files |= cloud_runs.checkpoint(3) if kind == "failed" else {}
            cloud.keep(files)
            job = cloud.start(program)
            self.job[kind] = job.id
            self._wait_for(job, *(("RUNNING",) if kind == "running" else ("COMPLETED", "ERROR")))
        cloud_runs.RUN_ID, cloud_runs.FOLDER = first

    def _wait_for(self, job: Any, *stages: str) -> None:
        end = time.monotonic() + 20
        while job.stage not in stages and time.monotonic() < end:
            time.sleep(0.02)

    def fresh(self) -> Path:
        """The Hub and the disk as on the first day."""
        hub = self.hub
        hub.faults.clear()
        for job in hub.jobs.all:
            if job not in self._jobs:
                job.cancelled.set()
        hub.jobs.all[:] = self._jobs
        for job in self._jobs:
            if job.cancelled.is_set():
                hub.jobs.again(job)
                self._wait_for(job, "RUNNING")
        hub.buckets = copy.deepcopy(self._buckets)
        for kept in (hub.log, hub.faults.struck, hub.repositories, hub.unknown, self.elsewhere.sent):
            kept.clear()  # type: ignore[attr-defined]
        hub.faults.add_job(JobFault("stuck", attempt=None))
        add_model(hub)
        rows = "".join(json.dumps({"prompt": f"q{n}", "completion": "a"}) + "\n" for n in range(20)).encode()
        card = b"---\nlicense: mit\n---\n# Rows\n"
        hub.add("dataset", DATA, {"train.jsonl": rows, "README.md": card})
        shutil.rmtree(self.home, ignore_errors=True)
        self._begun += 1
        folder = self.folder / f"input-{self._begun}"
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes(rows)
        return folder

    def routes(self, story: Story) -> list[tuple[str, str]]:
        """Those that the story uses when all is well, which it must be."""
        folder = self.fresh()
        done = self._call(folder, story)
        assert done.code in (0, 5, 8) and (done.code != 8 or story.name == "wait"), (story, done)
        assert self.hub.unknown == [], self.hub.unknown
        used = [(r.method, route[1]) for r in self.hub.log for route in ROUTES if _is_of(route, r)]
        shutil.rmtree(folder)
        return list(dict.fromkeys(used))

    def play(self, one: Play, seed: int) -> None:
        """One input, and all that must hold after it."""
        folder = self.fresh()
        dice = random.Random(f"{seed} {one}")
        method, pattern = one.route
        fault = one.trouble.fault(dice, self.elsewhere.url)
        self.hub.faults.add(
            f"^{method} {pattern}$", fault, times=ALWAYS if one.trouble.slow else dice.choice((1, ALWAYS))
        )
        try:
            before = len(self.hub.jobs.all)
            done = self._call(folder, one.story)
            self.assert_explained(done)
            assert self.hub.token not in "".join(self.elsewhere.sent), "the token went to another host"
            taken = [sent for sent in self.elsewhere.sent if sent.startswith(("POST", "PUT", "DELETE"))]
            assert not taken or "/cas" in pattern, f"another host was sent {taken}"  # hf_xet has no such rule
            assert "the emulator broke" not in "".join(self.hub.unknown), self.hub.unknown
            if one.story.makes:
                self.hub.faults.clear()
                self.hub.faults.add_job(JobFault("stuck", attempt=None))
                again = self._call(folder, one.story)
                self.assert_explained(again)
                self._assert_one_job(before)
            self.ended[f"{done.code} {'done' if done.code == 0 else done.answer['error']['code']}"] += 1
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if one.trouble.name == "no end":  # a thread that was left behind still reads
                self._begin_again()

    def assert_explained(self, done: Done) -> None:
        said = done.stdout + done.stderr
        assert done.code in CODES and "Traceback" not in said, f"exit {done.code}: {_end_of(said)}"
        assert not (escape := hostile._ESCAPES.search(said)), f"{escape!r} for the terminal: {said[-1500:]}"
        assert self.hub.token not in said, "the token is told"
        answer = done.answer
        assert answer["ok"] or (answer["error"]["message"] and answer["error"]["hint"]), answer["error"]

    def _assert_one_job(self, before: int) -> None:
        """Not two that are alive of one run, and none that was asked for twice."""
        made = self.hub.jobs.all[before:]
        attempts = [(job.labels.get("run"), job.labels.get("attempt")) for job in made]
        assert len(set(attempts)) == len(attempts) and sum(not job.ended for job in made) <= 1, attempts

    def _call(self, folder: Path, story: Story) -> Done:
        words = [word.format(job=self.job["running"]) for word in story.words]
        if story.run:
            shutil.copytree(self.folder / story.run, folder / "run", dirs_exist_ok=True)
        ended = threading.Event()
        late = threading.Timer(DEAD_SECONDS, lambda: (ended.set(), self.commands._child.send_signal(signal.SIGKILL)))
        late.start()
        before = self._resident(anew=True)
        started = time.monotonic()
        try:
            done = self.commands.run(folder, self.hub.environment(self.home) | IMPATIENT, *words)
        except (ValueError, OSError, TypeError) as error:
            self._begin_again()
            why = f"it hung for {DEAD_SECONDS:g} s" if ended.is_set() else f"its process ended: {error}"
            raise AssertionError(why) from None
        except AssertionError as error:  # a traceback
            raise AssertionError(_end_of(str(error))) from None
        finally:
            late.cancel()
        seconds, grown = time.monotonic() - started, self._resident() - before
        if grown > MOST_GROWTH:
            self._begin_again()
            raise AssertionError(f"{grown >> 20} MB more memory")
        assert seconds < MOST_SECONDS, f"{seconds:.0f} s: {done.stdout[:600]}{done.stderr[-600:]}"
        return done

    def _begin_again(self) -> None:
        self.commands._child.kill()
        self.commands._child.wait(20)
        self.commands = Commands(self.hub.environment(self.home) | IMPATIENT)

    def _resident(self, *, anew: bool = False) -> int:
        """The peak of the process for commands, on Linux; `anew` begins with what it has now."""
        folder = Path(f"/proc/{self.commands._child.pid}")
        if anew:
            with suppress(OSError):
                (folder / "clear_refs").write_text("5")
        try:
            found = re.search(r"VmHWM:\s+(\d+)", (folder / "status").read_text())
        except OSError:
            return 0
        return 1024 * int(found[1]) if found else 0

    def close(self) -> None:
        self.commands._child.kill()
        self.commands._child.wait(20)
        self.elsewhere.close()
        self.hub.__exit__()


def _is_of(route: Any, request: Any) -> bool:
    method = "GET" if request.method == "HEAD" else request.method
    return bool(route[0] == method and re.fullmatch(route[1], request.path))


def plays(routes: dict[str, list[tuple[str, str]]], seed: int) -> list[Play]:
    """Each trouble at each route, in the first story that uses it; in the others those that the dice choose. The slow
    ones come first, so that they are spread over the desks. The store's client is another program, and its answers are
    no JSON: one input of each trouble."""
    dice, made, seen = random.Random(seed), list[Play](), set[tuple[str, str]]()
    for story in STORIES:
        for route in routes[story.name]:
            store = "/cas" in route[1]
            every = route not in seen
            seen.add(route)
            for trouble in TROUBLES:
                times = 1 if store else trouble.times
                share = 1.0 if every else 0.0 if store else 0.1
                made += [Play(story, route, trouble, number) for number in range(times) if dice.random() < share]
    return sorted(made, key=lambda one: not one.trouble.slow)


@contextmanager
def desks(folder: Callable[[str], Path], count: int) -> Iterator[list[Desk]]:
    made = [Desk(folder("desk")) for _ in range(count)]
    try:
        yield made
    finally:
        for desk in made:
            desk.close()


def play_all(made: list[Desk], planned: list[Play], seed: int) -> tuple[list[str], Counter[str]]:
    """What failed: one of each kind, with how many there are of it. And how often what is known was met."""
    waiting, failed, counts = deque(planned), dict[str, str](), Counter[str]()
    known = Counter[str](dict.fromkeys(KNOWN, 0))

    def work(desk: Desk) -> None:
        while waiting:
            one = waiting.popleft()
            try:
                desk.play(one, seed)
            except Exception as error:  # noqa: BLE001 - told, and the next one begins
                told = f"{one}: {type(error).__name__}: {error}"
                pattern = next((each for each in KNOWN if re.search(each, told, re.DOTALL)), None)
                if pattern is not None:
                    known[pattern] += 1
                    continue
                kind = _kind(error)
                failed.setdefault(kind, told)
                counts[kind] += 1

    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(work, made))
    return [f"{said} ({counts[kind]} of this kind)" for kind, said in failed.items()], known


def _end_of(told: str) -> str:
    """Of a traceback: where it went through our modules, and what it says at last."""
    places = re.findall(r'File "[^"]*/skill_train/(\w+\.py)", line (\d+)', told)
    last = [line for line in told.splitlines() if re.match(r"[\w.]+(Error|Exception|Refused|Invalid)\b", line)]
    return f"{' '.join(':'.join(place) for place in places[-4:])} {last[-1][:400] if last else told[-800:]}"


def _kind(error: Exception) -> str:
    """Of a failure: its first words without numbers."""
    return re.sub(r"[0-9a-f]{6,}|\d+|(?<=u)[0-9a-f]{4}", "", str(error))[:70]
