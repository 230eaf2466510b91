"""What runs batches: the view of the model, the engine, the KV cache.

In: one batch of one step (`run_batch.run_batch`). Out: a `BatchOutput`, nothing else, but that
parcels may leave before the batch is through. It knows no sockets, tasks or users; whoever calls
makes sure that one batch runs at a time. Generated tokens pass in `passing` where nothing is
decided, else in `worker`; prompts and slots for others in `prefill`; guesses in `guesses`.
"""
