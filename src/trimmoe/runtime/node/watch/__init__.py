"""What watches a server and plans.

In: what is measured here and told by others. Out: engines in force (`planner.Planner`), built
beside the event loop when something changed that a decision would notice; reports and snapshots
(`reports`).
"""
