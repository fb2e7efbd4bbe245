"""A recorded sample as a conversation on the terminal, with a colour for each token.

Owns: the look. Never: reads trajectories. Invariant: nothing from a model reaches the terminal as a control sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from milesbatch.decisions.fates import Fate
from milesbatch.errors import ModelError
from milesbatch.trajectories.trajectory import Message, Trajectory

_BY_PROBABILITY = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.0, "bold red"))
_BY_VERSION = ("green", "yellow", "cyan", "magenta", "blue", "red")
_NOT_POLICY = "bright_black"

TokenText = Callable[[int], str]


class Colour(StrEnum):
    """What the colour of a token says."""

    LOGPROB = "logprob"
    MASK = "mask"
    VERSION = "version"
    NONE = "none"


def token_text(model_directory: Path) -> TokenText | None:
    """How to spell a token id with the run's tokenizer; None when the run has no ``tokenizer.json``.

    Raises:
        ModelError: the file is there, but is not a tokenizer, or the ``tokenizers`` package is missing.
    """
    path = model_directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ModelError(f"cannot read {path}: {error}", mend="install the `tokenizers` package") from error
    try:
        text = path.read_text(encoding="utf-8")
        # The package raises a bare Exception for a file it cannot read, so the likely damage is looked for here.
        if "model" not in json.loads(text):
            raise ValueError("it has no `model`")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable tokenizer: {error}") from error
    tokenizer = Tokenizer.from_str(text)
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))


def visible(text: str) -> str:
    """``text`` with control characters spelled out, new lines and tabs kept."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def print_sample(
    console: Console,
    trajectory: Trajectory,
    spell: TokenText | None,
    colour: Colour,
    *,
    fate: Fate | None = None,
    note: str = "",
) -> None:
    """Print one sample: facts, messages, then the tokens as the model saw them. ``note`` says why it is shown."""
    parts: list[RenderableType] = [Text(line) for line in _facts(trajectory, fate)]
    parts += [_message(message) for message in trajectory.messages]
    if trajectory.error is not None:
        parts.append(Text(f"failed: {visible(trajectory.error)}", style="bold red"))
    parts.append(_tokens(trajectory, spell, colour))
    title = f"group {trajectory.group_id}, sample {trajectory.sample_index}"
    if fate is not None:
        title += f", {fate}"
    console.print(Panel(Group(*parts), title=Text(title + (f" - {note}" if note else "")), title_align="left"))


def _message(message: Message) -> Text:
    role = visible(message.role) + (f" ({visible(message.tool_call_id)})" if message.tool_call_id else "")
    body = Text(f"{role}: ", style="bold")
    body.append(visible(message.content), style="not bold")
    for call in _calls(message.tool_calls) if message.tool_calls else ():
        body.append(f"\n  calls {visible(call)}", style="not bold italic")
    return body


def _calls(text: str) -> list[str]:
    """Tool calls as ``name(arguments) [id]``; the text itself when it has another form."""
    try:
        calls = json.loads(text)
        found = []
        for call in calls if isinstance(calls, list) else [calls]:
            function = call.get("function", call)
            arguments = function["arguments"]
            said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            found.append(f"{function['name']}({said})" + (f" [{call['id']}]" if call.get("id") else ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return [text]
    return found


def legend(colour: Colour) -> Text:
    """One line that says what the colours mean."""
    if colour is Colour.NONE:
        return Text("")
    line = Text("tokens: ")
    if colour is Colour.LOGPROB:
        for floor, style in _BY_PROBABILITY:
            line.append(f" p >= {floor:g} ", style)
    else:
        line.append("written by the policy, a colour for each version" if colour is Colour.VERSION else "trained on")
    line.append("  not written by the policy", _NOT_POLICY)
    return line


def _facts(trajectory: Trajectory, fate: Fate | None) -> Iterator[str]:
    parts = ", ".join(f"{visible(name)} {value:g}" for name, value in sorted(trajectory.rewards.items()))
    yield f"reward {trajectory.reward:g}{f' ({parts})' if parts else ''}, {trajectory.finish_reason}"
    spans = ", ".join(f"{span.version} from token {span.start}" for span in trajectory.versions) or "none"
    counts = f"{trajectory.prompt_tokens} + {trajectory.response_tokens} tokens in {trajectory.turns} turns"
    lag = (
        f", staleness {fate.step - 1 - trajectory.versions[0].version}"
        if fate is not None and trajectory.versions
        else ""
    )
    yield f"{counts}; versions {spans}{lag}"
    if trajectory.policy_tokens:
        mean = math.fsum(trajectory.logprobs) / trajectory.policy_tokens
        yield f"{trajectory.policy_tokens} tokens of the policy, mean logprob {mean:.3f} (perplexity {math.exp(-mean):.3g})"
    yield f"weights {trajectory.weights_digest or 'none'}"
    seconds = (trajectory.ended - trajectory.started).total_seconds()
    yield (
        f"{trajectory.worker}, incarnation {trajectory.incarnation}, seed {trajectory.seed}, "
        f"{trajectory.started:%Y-%m-%d %H:%M:%S} UTC, {seconds:.1f} s"
    )


def _tokens(trajectory: Trajectory, spell: TokenText | None, colour: Colour) -> Text:
    line = Text("tokens: ", style="bold")
    for position, token in enumerate(trajectory.tokens):
        text = visible(spell(token)) if spell else f"{token} "
        line.append(text, f"not bold {_style(trajectory, position, colour)}".rstrip())
    return line


def _style(trajectory: Trajectory, position: int, colour: Colour) -> str:
    if colour is Colour.NONE:
        return ""
    if not trajectory.loss_mask[position]:
        return _NOT_POLICY
    if colour is Colour.MASK:
        return "green"
    if colour is Colour.VERSION:
        index = sum(span.start <= position for span in trajectory.versions) - 1
        return _BY_VERSION[trajectory.versions[index].version % len(_BY_VERSION)]
    probability = math.exp(trajectory.logprobs[position])
    return next((style for floor, style in _BY_PROBABILITY if probability >= floor), "bold red")
