"""The models of `benchmarks.coverage`, what runs them, and what is said of them.

subject.py            a model with its inputs
from_transformers.py  the architectures of transformers, made small
shrinking.py          their configurations
inputs.py             their inputs, by the names of a forward's parameters
by_hand.py            what the two do not find
from_timm.py          a model of each family of timm
from_torchvision.py   the models of torchvision
catalogue.py          all of them by name
engines.py            what runs a model
case.py               one model under each engine, compared with eager
worker.py             a process that runs cases
pool.py               such processes, and their deaths
summary.py            counts
"""
