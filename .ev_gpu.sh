export PYTHONPATH=src:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
go() { name=$1; shift; mkdir -p $OUT/$name; timeout -k 3 48 python3 -m torch.distributed.run --standalone --nproc-per-node 2 tests/multi_gpu/train.py "$@" --seconds 40 --out $OUT/$name > $OUT/$name/log 2>&1; echo "$name rc $? $(date +%T)"; }
go keep ddp-step --keep & go drop ddp-step & go fsdp fsdp-step --steps 20 & go ar all-reduce --steps 12 &
wait
for n in keep drop fsdp ar; do echo "== $n"; cat $OUT/$n/*.json; echo; grep -v "^$" $OUT/$n/log | tail -45 | cut -c1-220; done
