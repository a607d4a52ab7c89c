"""What each codec costs and saves on a model and texts of one's own: ``lmkv codec report``.

``texts`` finds texts, ``model`` runs a transformers model over stored KV, ``methods`` takes KV through codecs as
containers are made (``baselines``: simulated ones), ``retrieval`` makes the question task, ``measure`` runs all of it,
``metrics`` has the statistics, ``table`` and ``plot`` show them. Only ``model`` and ``measure`` need torch.
"""
