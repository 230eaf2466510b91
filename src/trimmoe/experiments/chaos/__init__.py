"""`trimmoe chaos`: real servers, a gateway and eight streams, and whatever can go wrong with them.

`stage` starts and asks processes, `streams` are the clients, `failures` what is done to them and
`overload` what other clients do, `run` puts them together and `report` says what clients saw.
"""
