"""What one server process does: its share of the layers, of the experts and of the users.

Four rooms, each with its contract in its `__init__`, and what they all speak of:

- `front` faces users: admission, answers, speculation and its roll-backs.
- `schedule` decides what is computed next: messages become work, work becomes batches.
- `compute` runs batches; the only room that computes with torch.
- `watch` measures, and plans what to decide with.
- `records` are messages, rows and units of work.

`node.Node` puts them together; `inbox` says whom a message concerns; `outbox` is the way out.
A decode step on one server: `inbox`, `schedule.intake`, `schedule.batch_loop`, `compute.passing`,
`compute.execution`.
"""
