"""One stream whose tokens are guessed ahead: which source guesses, and what comes of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.cost.crowd import Crowd
from trimmoe.cost.guessing import interval_s, window
from trimmoe.cost.head_law import right_among


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What came of one token and the guess of what it predicts."""

    interval_s: float
    """From when it set out until the next one of its stream did."""
    in_vain: int
    """Tokens that set out behind it on a wrong guess."""

    def booked(self, whole: Ledger) -> Ledger:
        """The ledger of a token that took `whole` by itself. What is in vain is taken to send as
        much as the token does."""
        sent = whole.messages * (1 + self.in_vain)
        return replace(whole, delay_s=self.interval_s, messages=sent)


FIRST_CHANCE, _LATELY = 0.9, 0.05
"""What guesses of a new stream are taken to be right, and how much each one says of the next."""
_FORGOTTEN = 0.01
"""How much of that a source gets back with every token while another one guesses, so that it is
tried again."""
OWN, DRAFT_MODEL, HEAD = range(3)
"""Sources of guesses: a server's own pass, a small model beside it, and a draft head that goes on
from what full depth gave, whose drafts are read along with the token that they follow."""
FIRST_HEAD_CHANCE = 0.75
"""What drafts of a head are taken to be right in a new stream."""
MOST_CHANCE = 0.99
"""No source is taken to be right for certain."""
SWITCHES = 0.9
"""What share of the time from token to token another source has to take to be given the turn."""


MOST_TOGETHER, HELD_SHARE = 4, 0.25
"""Guesses that set out together: a compiled layer takes so many rows in the time of one, and the
first waits for the others for no more than this share of what a token takes to full depth."""


FAR = 8.0
"""Guesses of a server in the time that a token takes to full depth and back from which on that is
far: it is never waited for but by a window that is full, so that this may be twice as wide, and
whatever makes more of the guesses in the end may take a moment longer."""


@dataclass(kw_only=True, slots=True)
class Source:
    """Something that guesses what a stream goes on with."""

    guess_s: float
    """Time of a guess."""
    chance: float = FIRST_CHANCE
    """That a guess has of being right, by those of late."""
    able: bool = True
    """Whether it can guess at all."""

    def interval_s(self, whole_s: float, least: float, most: int) -> float:
        """From one token to the next, to be expected where each takes `whole_s` to full depth and
        back and `least` and `most` bound the window."""
        return interval_s(self.chance, self.guess_s, whole_s, least, most)

    def learn(self, right: bool, expected: float | None = None) -> None:
        """Word of a guess has come, of whose kind so many were `expected` to be right, by default
        as many as of all."""
        told = right - (self.chance if expected is None else expected)
        self.chance = min(max(self.chance + _LATELY * told, 0.0), MOST_CHANCE)

    def rest(self) -> None:
        """Another source has guessed a token."""
        self.chance += _FORGOTTEN * max(FIRST_CHANCE - self.chance, 0.0)


@dataclass(kw_only=True, slots=True)
class Lead:
    """One stream that has its servers to itself.

    The next token sets out `guess_s` after the last one if what that predicts is guessed, unless a
    `window` of them are ahead of what is confirmed; otherwise when the last one is through, and so
    it is where the guess was wrong. Tokens are through in turn.
    """

    guesses: int
    """The most that may be ahead."""
    guess_s: float
    """Time of a guess of the server's own pass."""
    others_s: tuple[float, ...] = ()
    """The same of other sources."""
    least: float = 0.0
    """Chance that all of those ahead have to have of being right."""
    head: bool = False
    """Whether a draft head's drafts may be had."""
    crowd: Crowd | None = None
    """What its tokens take beside others; None where nobody says."""
    pace_s: float | None = None
    """What a guess of the own pass took this server lately for one stream by itself, what was
    withdrawn meanwhile counted in; None where that was not measured."""
    along: int = 0
    """Drafts of a head that are read along with each token at most, where it is the head's turn."""
    likely: float = 0.0
    """Chance that one and all before it have to have of being right."""
    sources: list[Source] = field(init=False)
    """This server's own."""
    drafts: Source = field(init=False)
    """The draft head."""
    turn: int = OWN
    """The source that guesses."""
    unread: Sequence[int] = (0, 0)
    """Tokens that each of this server's own sources has not read: none does while the head has the
    turn."""
    left: int = 0
    """Tokens that are yet to come at the most; 0 where nobody says."""
    whole_s: float = 0.0
    """What the last token took to full depth and back, or the first one is expected to."""
    _through_s: deque[float] = field(default_factory=deque)
    """When those tokens are through that are under way when the next one sets out."""

    def __post_init__(self) -> None:
        self.sources = [Source(guess_s=each_s) for each_s in (self.guess_s, *self.others_s)]
        self.drafts = Source(guess_s=0.0, chance=FIRST_HEAD_CHANCE, able=self.head)

    @property
    def window(self) -> int:
        """How many may be ahead now."""
        if self.turn == HEAD:
            return self.along
        return window(self.source(self.turn).chance, self.least, self.guesses)

    def source(self, at: int) -> Source:
        """By its number."""
        return self.drafts if at == HEAD else self.sources[at]

    @property
    def is_far(self) -> bool:
        """Whether full depth is, by the last token's time."""
        guess_s = self.source(self.turn).guess_s
        return 0.0 < FAR * guess_s <= self.whole_s

    @property
    def together(self) -> int:
        """How many guesses are to set out together, where they gain by that: as many as are made
        while hardly anything is lost by waiting."""
        guess_s = self.source(self.turn).guess_s
        if guess_s <= 0.0:
            return 1
        return min(1 + int(HELD_SHARE * self.whole_s / guess_s), MOST_TOGETHER)

    def choose(self, beside: Sequence[Lead] = ()) -> int:
        """Give the turn to the source with which tokens are expected to follow one another soonest,
        by what its guesses take and how often they were right lately: of the streams `beside` it
        too, those of the same server's users, as tokens of all of them pass in one batch."""
        able = [at for at, source in enumerate(self.sources) if source.able]
        best = min(able, key=self._interval_s, default=OWN)
        self.along = 0
        if self.drafts.able and self.crowd is not None:
            right = self._right(HEAD, beside)
            # Whoever has the turn keeps it where it makes hardly a difference.
            worth = 1.0 / SWITCHES if self.turn == HEAD else SWITCHES
            if able:
                own_s = self._crowded_s(self.crowd, best, self._right(best, beside)) * worth
                along, best_s = self.crowd.turn(right, own_s)
                self.along = MOST_DRAFTED * along
                if not along and best_s < own_s:
                    # Nothing ahead brings the next token sooner.
                    self.least = math.inf
            else:
                self.along = self.crowd.drafts_at_home(right)
            self.likely = self.crowd.along(self.drafts.chance)[0]
        self.turn = HEAD if self.along else best
        return self.turn

    def _right(self, at: int, beside: Sequence[Lead]) -> float:
        """How often guesses of a source are right, on average over this stream and those beside
        it."""
        others = [one.source(at) for one in beside if one is not self]
        chances = [self.source(at).chance, *(one.chance for one in others if one.able)]
        return sum(chances) / len(chances)

    def _crowded_s(self, crowd: Crowd, at: int, chance: float) -> float:
        """From one token to the next by a source of this server's own, with such a chance of being
        right; what it has to read first is shared by all tokens that are left."""
        one_s, reading_s = self.sources[at].guess_s, 0.0
        guess_s = crowd.among_s(one_s)
        if at == OWN and self.pace_s is not None:
            guess_s = crowd.among_s(self.pace_s, in_vain=1.0)
        if self.turn == HEAD and self.left > 0:
            reading_s = crowd.reading_s(one_s, self.unread[at]) / self.left
        return reading_s + crowd.own_s(chance, guess_s, self.least, self.guesses)

    def pays(self, chance: float) -> bool:
        """Whether tokens are expected to follow one another no later by guesses that take no time
        and have such a chance of being right than by the source whose turn it is."""
        free = Source(guess_s=0.0, chance=chance)
        interval_s = free.interval_s(self.whole_s, self.least, self.guesses)
        if self.turn == HEAD:
            assert self.crowd is not None
            return interval_s <= self.crowd.along(self.drafts.chance)[1]
        return interval_s <= self._interval_s(self.turn)

    def _interval_s(self, at: int) -> float:
        return self.sources[at].interval_s(self.whole_s, self.least, self.guesses)

    def after(
        self, whole_s: float, *, guessed: bool, right: bool, source: int | None = OWN
    ) -> Passed:
        """The next token sets out and takes `whole_s` seconds to full depth and back; whether what
        it predicts is guessed, and rightly, and by which source; None where that was none of
        them."""
        guess_s = self.source(self.turn if source is None else source).guess_s
        self.whole_s = whole_s
        ahead = len(self._through_s)
        done_s = max(whole_s, self._through_s[-1]) if ahead else whole_s
        self._through_s.append(done_s)
        in_vain = 0
        interval_s = done_s
        if guessed and right:
            confirmed = len(self._through_s) - 1 - max(self.window, 1)
            free_s = self._through_s[confirmed] if confirmed >= 0 else 0.0
            interval_s = min(max(guess_s, free_s), done_s)
        elif guessed:
            most = max(self.window, 1)
            in_vain = sum(made * guess_s <= done_s for made in range(1, most + 1))
        for at, one in (*enumerate(self.sources), (HEAD, self.drafts)):
            if guessed and at == source:
                # Only drafts that the head is sure of are read along.
                sure = right_among(self.likely, one.chance) if at == HEAD else None
                one.learn(right, sure)
            elif at != self.turn:
                one.rest()
        left = (at_s - interval_s for at_s in self._through_s)
        self._through_s = deque(at_s for at_s in left if at_s > 0)
        return Passed(interval_s=interval_s, in_vain=in_vain)


@dataclass(kw_only=True, slots=True)
class Chunks:
    """One stream that has its servers to itself and whose guesses are verified so many at a time.

    They are made one upon the other, then the known token and all of them pass the layers as one
    batch. Up to the first wrong one they are all through together.
    """

    guesses: int
    guess_s: float
    row_s: float
    """What one more row takes a batch."""
    turn: int = OWN
    _left: int = 0
    """Guesses of the chunk behind the token that comes next."""
    _whole: bool = True
    """Whether the next token begins a chunk."""

    def choose(self) -> int:
        """There is one source only."""
        return self.turn

    def after(
        self, whole_s: float, *, guessed: bool, right: bool, source: int | None = OWN
    ) -> Passed:
        """As of `Lead`: a chunk's first token takes as long as all of it."""
        interval_s = 0.0
        if self._whole:
            self._left = self.guesses
            interval_s = whole_s + self.guesses * (self.guess_s + self.row_s)
        goes_on = guessed and right and self._left > 0
        in_vain = 0 if goes_on else self._left
        self._left, self._whole = self._left - 1, not goes_on
        return Passed(interval_s=interval_s, in_vain=in_vain)
