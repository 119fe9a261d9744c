"""More than one device for one model: tensor parallelism in a layer, pipeline parallelism between layers. Lesson 14.

group.py     the ranks that belong together, and what they say to each other: counted and timed
shard.py     which slice of each weight a rank holds, and which sizes divide
linear.py    the layers that need the others: row-parallel linears, vocabulary-parallel embedding and head
pipeline.py  stages, micro-batches, and the bubble
executor.py  what every rank does in a step
runner.py    the driver's side: a step told to all ranks
ranks.py     one process's groups, and what all ranks must agree on
launch.py    processes: started, watched, ended
"""
