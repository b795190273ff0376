"""Every trajectory of a run, token for token, as the trainer saw it: `frames` is the log, `records` what is in it."""

from tooljax.store.records import Header as Header
from tooljax.store.records import Record as Record
from tooljax.store.store import StoredStep as StoredStep
from tooljax.store.store import StoreError as StoreError
from tooljax.store.store import TrajectoryStore as TrajectoryStore
from tooljax.store.store import read_step as read_step
from tooljax.store.store import stored_steps as stored_steps
