"""One adapter for every decoder-only MoE model of transformers.

The model's own modules run. `skeleton` finds decoder, layers, routers and experts in them; `halves`
finds by trial, on a few random states, how a layer makes its output of what attention and experts
give; `stored` reads their weights, experts by byte range, whatever a checkpoint calls them;
`attention`, `caching` and `passing` keep what attention remembers in the slots of a cache; `view`
puts them together as a `MoEView`. What a family does that cannot be found, or that this adapter
cannot serve, is in the table of `catalogue`.
"""
