"""A conversation in the terminal with a running server, and what became of every answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from trimmoe.core.errors import UserError
from trimmoe.experiments.client import Answer, Client, Message, TooLong

HELP = "/new forgets the conversation, /exit ends it, Ctrl-C stops an answer."
_LEAVE, _FORGET = ("/exit", "/quit", "/q"), ("/new", "/clear")


class Chat:
    """The turns so far, and what to ask for."""

    def __init__(
        self, client: Client, model: str, console: Console, *, system: str = "", **options: Any
    ) -> None:
        self._client, self._model, self._console = client, model, console
        self._system = [{"role": "system", "content": system}] if system else []
        self._options = options
        self.turns: list[Message] = []

    def run(self, read: Callable[[], str]) -> None:
        """Answer each line that `read` gives until it raises `EOFError` or the user leaves."""
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line in _LEAVE:
                return
            if line in _FORGET:
                self.turns.clear()
                self._note("Forgotten.")
            elif line.startswith("/"):
                self._note(HELP)
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        self.turns.append({"role": "user", "content": line})
        try:
            answer = self._answered()
        except UserError as error:
            self.turns.pop()
            self._console.print(escape(str(error)), style="red", soft_wrap=True)
            return
        self._console.print()
        self.turns.append({"role": "assistant", "content": answer.text})
        self._note(account(answer))

    def _answered(self) -> Answer:
        """The answer to the turns; the oldest are forgotten as far as the context asks for it."""
        while True:
            try:
                return self._client.chat(
                    self._model, self._system + self.turns, show=self._show, **self._options
                )
            except TooLong:
                if len(self.turns) < 3:
                    raise
                del self.turns[:2]
                self._note("The context is full: the oldest turn is forgotten.")

    def _show(self, piece: str) -> None:
        self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)


def account(answer: Answer) -> str:
    """What an answer took and what became of it, in two lines at most."""
    timed = f"{answer.tokens} tokens, the first after {answer.ttft_s:.2f} s"
    if answer.tokens_per_s is not None:
        timed += f", then {answer.tokens_per_s:.1f} a second"
    if answer.stopped:
        return f"{timed}; stopped"
    return "\n".join(filter(None, (timed, became(answer))))


def became(answer: Answer) -> str:
    """What became of the tokens' layers, in one line; empty where the server does not say."""
    if not answer.share("executed"):
        return ""
    remote = answer.share("remote")
    parts = [f"{answer.share('executed') - remote:.0%} local", f"{remote:.0%} remote"]
    for kind, word in (
        ("substituted", "with substitutes"),
        ("stood_in", "with stand-ins"),
        ("skipped", "skipped"),
        ("exited", "exited"),
    ):
        if answer.share(kind):
            parts.append(f"{answer.share(kind):.0%} {word}")
    line = f"layers: {', '.join(parts)}; {answer.ledger.get('hops', 0)} hops, "
    line += f"{answer.ledger.get('bytes', 0) / 1e3:.0f} kB"
    if answer.guesses:
        line += f"; guessed {answer.right_guesses} right of {answer.guesses}"
    return line
