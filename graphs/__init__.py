"""Keys, dispatch, capture and replay.

`settings` say what is captured, `sizes` make the keys of it, `dispatch` chooses a key for each step, `graph_set` captures all keys
at the start and runs them, over the backend of the device. Nothing here knows a model, a compiler or the worker.
"""
