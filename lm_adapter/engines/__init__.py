"""One module per engine: ``hf`` drives the reference language models. Nothing is imported before it is asked
for."""
