"""The checks before and after a training, each with its figure, and the verdict over all of them."""

import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypedDict

from skill_train.program.chat.labels import IGNORED, trained_tokens
from skill_train.program.events import is_main_process, number, write_json
from skill_train.program.examples import EncodedRow, Tokens
from skill_train.program.folders.checkpoints import from_earlier_start, is_complete, without
from skill_train.program.model import is_full, read_back
from skill_train.program.plan import Recipe
from skill_train.program.split import Data

FIXED_ROWS = 8  # training rows whose loss is measured before and after
LEAST_FALL = 1e-4  # share of the loss; a smaller change may be rounding
LOOKED_AT, LEAST_MOVED = 4096, 0.001  # values of each weight, and the share of them that a training moves
ANSWER_TOKENS = 48
PICTURE_CHANGE = 1e-5  # least relative change of the loss; in float32 the same pictures give the same loss to 1e-7
RELOAD_TOKENS = 64  # enough to see a wrong adapter; the logits of a long row would need more memory than training


Verdict = Literal["pass", "warn", "fail"]


class TrainingCheck(TypedDict):
    """The result of one check."""

    name: str
    verdict: Verdict
    figure: float | None
    detail: str


class Answer(TypedDict, total=False):
    """One prompt, answered before and after training; None if no process holds the whole model."""

    prompt: str
    before: str | None
    after: str | None


class Checks:
    """Runs the checks of a training, and collects their results."""

    def __init__(self, trainer: Any, tokenizer: Any, data: Data, recipe: Recipe) -> None:
        self.trainer, self.tokenizer, self.data, self.recipe = trainer, tokenizer, data, recipe
        self.pictures = data.get("pictures")
        fed = list(dict.fromkeys(data["order"]))
        self.rows = [data["train"][i] for i in fed[:FIXED_ROWS]]
        self.results: list[TrainingCheck] = []
        self.answer: Answer = {}
        self.loss_before: float | None = None
        self.started: list[Any] = []  # of each weight the first values, where all are trained, before that

    def add(self, name: str, verdict: Verdict, figure: float | None, detail: str) -> None:
        figure = number(figure) if isinstance(figure, float) else figure
        self.results.append({"name": name, "verdict": verdict, "figure": figure, "detail": detail})

    def verdict(self) -> Verdict:
        verdicts = [result["verdict"] for result in self.results]
        return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "pass"

    def before_training(self, *, resumed: bool, folder: Path) -> None:
        """Measures what training will change. A resumed run reads these figures from its first start."""
        model = self.trainer.model
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.add("model_loads", "pass", trainable, f"{trainable:,} trainable parameters")
        self.check_batches()
        if self.trainer.is_fsdp_enabled:
            self.answer = {"prompt": self.prompt()[0], "before": None, "after": None}
            why = "FSDP: no process holds the whole model; accumulation, loss on fixed rows and reload are not measured"
            return self.add("whole_model", "warn", None, why)
        first_start = folder / "checkpoints" / "before.json"
        if resumed and first_start.is_file():
            before = from_earlier_start(first_start, itemgetter("loss", "answer", "results"), without(first_start))
            self.loss_before, self.answer = before[:2]
            self.results += before[2]
            return
        self.check_accumulation()
        self.check_pictures_are_read()
        self.loss_before, self.started = self.mean_loss(self.rows), self.first_values() if is_full(self.recipe) else []
        self.answer = {"prompt": self.prompt()[0], "before": self.answer_now()}
        if is_main_process():
            before = {"loss": self.loss_before, "answer": self.answer, "results": self.results[2:]}
            write_json(first_start, before)

    def after_training(self, folder: Path, tuned: Path) -> None:
        sharded = self.trainer.is_fsdp_enabled
        if not sharded:
            self.check_loss()
            self.check_pictures_help()
        saved = sorted(p.name for p in (folder / "checkpoints").glob("checkpoint-*") if is_complete(p))
        self.add("checkpoint_saves", "pass" if saved else "fail", len(saved), ", ".join(saved) or "none")
        if not sharded:
            self.answer["after"] = self.answer_now()
            if tuned.is_dir():  # only the first machine has it
                self.check_reload(tuned)

    def check_batches(self) -> None:
        """Checks that the trainer's loss of a row is the cross-entropy of its trained tokens. Where a library
        moves labels or leaves some out, every other check passes: the loss of the wrong tokens falls as well."""
        figures = self.data["figures"]
        verdict: Verdict = "pass"
        share = figures["trained_token_share"]
        detail = f"{share:.0%} of the tokens are trained in {figures['train_rows']} rows"
        rows = [] if self.trainer.is_fsdp_enabled else self.rows[:2]  # with FSDP no process holds the whole model
        for row in rows:
            stated, plain = self.losses_of_end(row)
            if not abs(stated - plain) <= (0.05 if self.is_coarse else 1e-3) * max(1.0, plain):
                verdict = "fail"
                detail += (
                    f"; of line {row['line']} the trainer's loss is {stated:.4f}, and the cross-entropy {plain:.4f}"
                )
        self.add("batches_are_valid", verdict, share, detail)

    def losses_of_end(self, row: EncodedRow) -> tuple[float, float]:
        """The trainer's loss of a row, and the cross-entropy of the model's logits, over its last tokens."""
        import torch

        some = self.end_of(row, RELOAD_TOKENS)
        logits = self.logits(self.trainer.model, some)[0, :-1]
        labels = torch.tensor(some["labels"][1:], device=logits.device)
        plain = float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED))
        return self.mean_loss([some]), plain

    @property
    def is_coarse(self) -> bool:
        return bool(self.trainer.args.bf16 or self.trainer.args.fp16 or self.recipe["pure_bf16"])

    def check_accumulation(self) -> None:
        """Checks that accumulated gradients equal those of the large batch: a wrong scale shows in nothing else."""
        import torch

        rows = self.short_rows(self.rows[: min(4, self.recipe["effective_batch_size"])])
        if len(rows) < 2:
            return self.add("accumulation", "warn", None, "one row only: nothing to accumulate")
        large = self.gradient([rows])
        small = self.gradient([[row] for row in rows])
        apart = sum(float(torch.linalg.norm(a.float() - b.float())) ** 2 for a, b in zip(large, small, strict=True))
        size = sum(float(torch.linalg.norm(a.float())) ** 2 for a in large)
        if not size:
            return self.add("accumulation", "warn", None, "these rows change no weight: nothing to accumulate")
        error = math.sqrt(apart) / max(math.sqrt(size), 1e-12)
        limit = 0.05 if self.is_coarse else 1e-3
        self.add("accumulation", "pass" if error <= limit else "fail", error, f"relative difference, at most {limit}")

    def picture_losses(self) -> tuple[float, float] | None:
        """The mean loss of the fixed rows that have pictures: with their own pictures, and with grey pictures of the
        same size, so of as many tokens. None if no row has a picture."""
        rows = [row for row in self.rows if row.get("images")]
        if self.pictures is None or not rows:
            return None
        own = self.mean_loss(rows)
        with self.pictures.all_grey():
            return own, self.mean_loss(rows)

    def check_pictures_are_read(self) -> None:
        """Checks that another picture gives another loss. A model that ignores pictures still learns from the words."""
        if (losses := self.picture_losses()) is None:
            return
        own, grey = losses
        change = abs(own - grey) / max(abs(own), 1e-12)
        verdict: Verdict = "pass" if change > PICTURE_CHANGE else "fail"
        detail = f"loss {own:.4f}, and {grey:.4f} with grey pictures; they must differ by more than {PICTURE_CHANGE:g}"
        self.add("pictures_are_read", verdict, change, f"{detail} of it")

    def check_pictures_help(self) -> None:
        """Checks whether the trained answers depend on what the pictures show."""
        if (losses := self.picture_losses()) is None:
            return
        own, grey = losses
        detail = f"loss {own:.4f} after training, and {grey:.4f} with grey pictures, on the same rows"
        if grey > own:
            return self.add("pictures_help", "pass", grey - own, detail)
        self.add("pictures_help", "warn", grey - own, f"{detail}: the answers do not depend on what the pictures show")

    def short_rows(self, rows: Sequence[Tokens]) -> list[Tokens]:
        """The end of each row. Together they need the memory of one batch at most, where they have no pictures."""
        batch = self.trainer.args.per_device_train_batch_size
        return [self.end_of(row, max(2, self.recipe["max_length"] * batch // len(rows))) for row in rows]

    def end_of(self, row: Any, keep: int) -> Any:
        """The row up to its last trained token, with so many tokens. A row with pictures stays: they cannot be cut."""
        if row.get("images"):
            return row
        end = max(i for i, label in enumerate(row["labels"]) if label != IGNORED) + 1
        return row | {name: row[name][max(0, end - keep) : end] for name in ("input_ids", "labels")}

    def gradient(self, batches: list[list[Tokens]]) -> list[Any]:
        """The gradient of the trainer's own mean loss over all batches, without dropout, one tensor a weight. The
        trainer counts the trained tokens, as it does in each step."""
        model = self.trainer.model
        model.eval()
        total = self.trainer._get_num_items_in_batch(list(map(self.collated, batches)), model.device)
        for batch in batches:
            self.loss(batch, total).backward()
        gradient = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model.train()
        return gradient

    def loss(self, rows: Sequence[Tokens], items: Any) -> Any:
        """The loss of the trained tokens, without the balancing loss of experts. That is a mean over each batch, so it
        would depend on how the rows are split."""
        inputs = {key: value.to(self.trainer.model.device) for key, value in self.collated(rows).items()}
        balanced, self.trainer.aux_loss_enabled = self.trainer.aux_loss_enabled, False
        with self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(self.trainer.model, inputs, num_items_in_batch=items)
        self.trainer.aux_loss_enabled = balanced
        self.trainer._metrics["eval"].clear()
        return loss / max(1, self.trainer.accelerator.num_processes)

    def collated(self, rows: Sequence[Tokens]) -> Any:
        plain = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]
        return self.trainer.data_collator(plain if self.pictures is None else rows)

    def mean_loss(self, rows: Sequence[EncodedRow]) -> float:
        """Mean loss on some training rows, without dropout."""
        import torch

        self.trainer.model.eval()
        with torch.no_grad():
            items = torch.tensor(sum(trained_tokens(row) for row in rows), device=self.trainer.model.device)
            loss = sum(float(self.loss([row], items)) for row in rows)
        self.trainer.model.train()
        return loss

    def first_values(self) -> list[Any]:
        weights = (weight for weight in self.trainer.model.parameters() if weight.requires_grad)
        return [weight.detach().flatten()[:LOOKED_AT].clone() for weight in weights]

    def check_loss(self) -> None:
        import torch

        after, before = self.mean_loss(self.rows), self.loss_before or 0.0
        detail = f"{before:.4f} before, {after:.4f} after, on the same {len(self.rows)} training rows"
        balance = [logs["aux_loss"] for logs in self.trainer.state.log_history if logs.get("aux_loss")]
        if balance:
            more = self.trainer.router_aux_loss_coef * balance[-1]
            detail += f"; the loss of the last step holds {more:.4f} more, for the balance of the experts"
        size = self.trainer.model.config.get_text_config().vocab_size
        if before > math.log(size):  # a perplexity above the size of the vocabulary: wrong weights or tokenizer
            detail += f"; the base is worse than blind guessing among {size:,} tokens, {math.log(size):.4f}"
        least = before * (1 - LEAST_FALL)
        verdict: Verdict = "pass" if after < least else "warn" if after < 1.05 * before else "fail"
        if abs(after - before) <= before - least:
            detail += f"; it changed by less than {LEAST_FALL:.2%}: raise learning_rate, or train more steps"
        started_at_zero = [w for name, w in self.trainer.model.named_parameters() if ".lora_B." in name]
        if started_at_zero and not any(bool(weight.any()) for weight in started_at_zero):
            verdict, detail = "fail", f"{detail}; every B of the adapter is zero as before, so it changes nothing"
        if after == before and self.started:
            pairs = zip(self.started, self.first_values(), strict=True)
            moved = float(torch.cat([(own != other).cpu() for own, other in pairs]).float().mean())
            if moved < LEAST_MOVED:
                verdict, detail = "fail", f"{detail}; {moved:.2%} of the weights have moved"
        self.add("loss_falls", verdict if math.isfinite(after) else "fail", number(before - after), detail)

    def check_reload(self, tuned: Path) -> None:
        """Checks that the saved files, read back, give the logits of the model that was trained."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        row = self.rows[0]
        trained = self.logits(model, row)
        if is_full(self.recipe):
            self.trainer.model.zero_grad()  # makes room for a second model, as the next line does
            self.trainer.optimizer.state.clear()
            name, reloaded = "model_reloads", self.logits(read_back(self.recipe, tuned, model).to(model.device), row)
        else:
            self.load_again(tuned, model)
            name, reloaded = "adapter_reloads", self.logits(model, row)
        difference = float((trained - reloaded).abs().max().cpu())
        limit = 1e-4 * max(1.0, float(trained.abs().max().cpu()))
        verdict: Verdict = "pass" if difference <= limit else "fail"
        self.add(name, verdict, difference, f"largest difference of the logits, at most {limit:.1e}")

    def load_again(self, tuned: Path, model: Any) -> None:
        """Loads the saved adapter as a second one, in the types of the first. PEFT (0.21) would round a module that
        trained whole to the type of the base."""
        from peft import set_peft_model_state_dict
        from peft.utils import load_peft_weights

        model.load_adapter(str(tuned), adapter_name="reloaded", is_trainable=False)
        weights = dict(model.named_parameters(remove_duplicate=False))
        for name in (name for name in weights if ".reloaded" in name):
            first = weights[name.replace(".reloaded", ".default")]
            weights[name].data = weights[name].data.to(first.dtype)
        set_peft_model_state_dict(model, load_peft_weights(str(tuned), device="cpu"), adapter_name="reloaded")
        model.set_adapter("reloaded")

    def logits(self, model: Any, row: EncodedRow) -> Any:
        import torch

        model.eval()
        short = row["input_ids"] if row.get("images") else row["input_ids"][:RELOAD_TOKENS]
        inputs = self.inputs(row, short, model.device)
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return model(**inputs).logits.float()

    def inputs(self, row: EncodedRow, ids: list[int], device: Any) -> dict[str, Any]:
        """Some ids of a row, with its pictures, as the model takes them."""
        import torch

        if self.pictures is None:
            tensor = torch.tensor([ids], device=device)
            return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
        pictures = {name: row.get(name) or [] for name in ("images", "image_sha256")}
        batch = self.trainer.data_collator([{"input_ids": ids, **pictures}])
        return {name: value.to(device) for name, value in batch.items()}

    def prompt(self) -> tuple[str, list[int]]:
        """The text and ids before the first trained token of a held-out row, or of a training row if none is held out.
        They hold all pictures of the row, without which the model cannot be asked."""
        ids, labels = (self.asked_row()[name] for name in ("input_ids", "labels"))
        picture = self.pictures.token_id if self.pictures is not None else None
        least = max((at for at, token in enumerate(ids) if token == picture), default=0) + 1
        first = next((at for at in range(least, len(ids)) if labels[at] != IGNORED), len(ids))
        return self.tokenizer.decode(ids[:first]), ids[:first]

    def asked_row(self) -> EncodedRow:
        return (self.data["held_out"] or self.rows)[0]

    def answer_now(self) -> str:
        import torch

        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        model.eval()
        inputs = self.inputs(self.asked_row(), self.prompt()[1], model.device)
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            out = model.generate(
                **inputs,
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                use_cache=True,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
            )
        model.train()
        return str(self.tokenizer.decode(out[0][inputs["input_ids"].shape[1] :], skip_special_tokens=False))
