"""What the rooms of a server speak of: messages, rows, units of work, places; data and its checks.

Knows no room. What comes from the wire is checked here before anybody acts upon it.
"""
