"""Making nodes run as processes: addresses, artifacts, who watches them, joining, the end."""
