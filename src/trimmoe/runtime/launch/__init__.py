"""Making nodes run as processes: addresses, cached artifacts, Ray actors, supervision, shutdown."""
