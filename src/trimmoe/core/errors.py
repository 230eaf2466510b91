"""Errors that a user can act on."""


class UserError(Exception):
    """Something the user can mend; the message is one sentence that says what to do.

    The command line prints the message and exits with code 2. Broken invariants of our own are
    `AssertionError`s and are never dressed up as this. Messages name what files hold: whatever
    would move a terminal's cursor or colour it is taken out.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("".join(c if c.isprintable() else " " for c in message))
