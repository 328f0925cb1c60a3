"""Put in front of a server's PYTHONPATH: its ``sitecustomize`` runs in every Python of the server.

Nothing else may live in this folder, since everything in it becomes importable by the server under
its bare name.
"""
