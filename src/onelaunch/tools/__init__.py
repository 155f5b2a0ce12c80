"""What is beside a call: comparing, profiling, diagnosing, and the command. No call needs it.

rules/      the rules of the doctor, each with its documentation
bench/      `ol.compare`: engines in processes of their own, timed in turn
profiler/   `ol.profile`: where a call's time goes
doctor/     `ol.diagnose`: what stops a graph, makes it wrong, or is slow, by the line
checklist/  `ol.optimize`: the settings that pay, tried one by one
report/     results as text and as pages
names.py    names that a user picks from a list
targets.py  targets of the command, and the files behind them
cli/        the command `onelaunch`
"""
