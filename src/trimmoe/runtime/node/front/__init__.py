"""What faces users, on the server that a user talks to.

In: requests (`front_end.FrontEnd`), and from the inbox what became of their tokens (`answers`).
Out: token events, and by a `jobs.FrontEndContext` messages and arrivals. It decides what sets out,
what is shown and what is withdrawn; nothing is shown that full depth has not confirmed. Runs on the
event loop alone and computes nothing.
"""
