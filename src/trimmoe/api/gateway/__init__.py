"""A front before the servers of a cluster that hides their failures from clients.

In come requests as servers take them, out go answers as servers give them. Whatever breaks on the
way is tried again at another server, and answers that had begun go on there by the tokens that
came. It keeps nothing that outlives a request.
"""
