"""
Reading a plan with explain
===========================

Before anything runs, a network, a loss and an optimizer are lowered to a plan: all operations of a training step,
in order, with what each reads and writes. It is what a database calls a query plan, for training.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import mlpgpu as mg

layers = [mg.Dense(784, 1024, "relu"), mg.Dropout(0.1), mg.Dense(1024, 1024, "relu"), mg.Dense(1024, 10)]
net = mg.Network(layers, seed=1)
trainer = mg.Trainer(net, "softmax_cross_entropy", mg.Momentum(0.1, clip_norm=1.0), batch_size=1024)
print(trainer.plan)

# %%
# ``gather`` fetches the batch's rows.  Each ``dense`` writes its outputs under a new name; the ones that a backward
# operation needs are still there when it comes.  Backward operations write gradients, ``reduce`` adds those of all
# shards up, ``norm`` is there because ``clip_norm`` is, and ``update`` moves all parameters at once.
#
# ``python -m mlpgpu explain`` says what a card would make of the plan, and why.  The card need not be here.

path = Path(tempfile.mkdtemp()) / "run.h5"
trainer.save(path)
command = [sys.executable, "-m", "mlpgpu", "explain", str(path), "--card", "H200"]
told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
print(told[told.index("trains") :])

# %%
# The first table has a row for each operation with its path and the reason for it; the second one shows which
# operations become one launch.  On a machine with a GPU, ``explain`` measures each launch as well.
#
# How much work each operation is:

plan = trainer.plan
names = [f"{number} {type(operation).__name__}" for number, operation in enumerate(plan.training)]
work = [plan.flops(operation, plan.capacity) / 1e9 for operation in plan.training]

figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
axes.barh(names, work, color=["C1" if "Backward" in name else "C0" for name in names])
axes.invert_yaxis()
axes.set(xlabel="arithmetic of the operation's products, GFLOP", ylabel="operation of the plan")
plt.show()

# %%
# The products between wide layers are nearly all of the work.  ``8 DenseBackward`` has twice the arithmetic of its
# forward ``3 Dense``, since it makes two products: the gradient by the weights and that by the inputs.  ``11
# DenseBackward`` makes one, for nothing below the first layer is trained.
