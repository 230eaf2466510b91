"""The node that servers run; tests put a stand-in in its place."""

from __future__ import annotations

from trimmoe.runtime.launch.server import NodeFactory, NodeParts, RunningNode
from trimmoe.runtime.node.node import Node
from trimmoe.runtime.node.records.messages import MESSAGE_TYPES
from trimmoe.runtime.node.settings import NodeSettings
from trimmoe.runtime.wire.codec import MessageTypes


def make_node(parts: NodeParts) -> RunningNode:
    """A node with the plan's part of the model."""
    spec = parts.spec
    return Node(
        view=parts.view,
        profile=spec.profile,
        plan=spec.plan,
        policy=spec.policy,
        maker=spec.maker,
        transport=parts.transport,
        settings=NodeSettings(
            server=spec.index,
            kv_slots=spec.kv_slots,
            max_waiting=spec.max_waiting,
            patience_s=spec.patience_s,
            prefix_cache=spec.prefix_cache,
            verify_share=spec.verify_share,
            slowdown=spec.slowdown,
            threads=spec.thread_count,
            machine=spec.machine,
            at_once=spec.at_once,
            seed=spec.index,
        ),
        model=parts.model,
        draft=parts.draft,
    )


def message_types() -> MessageTypes:
    """What nodes tell each other."""
    return MESSAGE_TYPES


real_node = NodeFactory(make=make_node, message_types=message_types)
