"""What is computed next.

In: messages about rows (`intake.Intake.take`) and what came of the last batch. Out: batches, one at
a time, to `compute` (`batch_loop.BatchLoop`), and what came of them as messages. It keeps the order
of every sequence: a unit enters a layer when all it attends to is written, and what was withdrawn
is dropped. Runs on the event loop alone.
"""
