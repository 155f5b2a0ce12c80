import copy, sys, time, warnings, statistics as st, json, os, traceback
warnings.simplefilter("error")
import torch
from torch import nn
import onelaunch as ol
from examples import workloads
print(torch.__version__, ol.__file__)
print([hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")])
dev=torch.device("cuda",0)
from examples.mlp import *
import examples.mlp, examples.cnn, examples.resnet, examples.bert
def wall(f, n=30, rounds=5):
    for _ in range(12): f()
    torch.cuda.synchronize(); out=[]; host=[]
    for _ in range(rounds):
        t=time.perf_counter()
        for _ in range(n): f()
        h=time.perf_counter()-t
        torch.cuda.synchronize(); out.append((time.perf_counter()-t)/n*1e6); host.append(h/n*1e6)
    return round(st.median(out),1), round(st.median(host),1)
first=lambda y: y if torch.is_tensor(y) else (y[0] if isinstance(y,tuple) else y["last_hidden_state"])
loss=lambda y: first(y).float().square().mean()
for name in (sys.argv[1:] or ["mlp","cnn","resnet50","bert"]):
    try: m,args=workloads.WORKLOADS[name]()
    except Exception as e: print(name, repr(e)); continue
    m=m.train().requires_grad_(True)
    for mm in m.modules():
        if isinstance(mm, nn.Dropout): mm.p=0.0
    if name=="bert":
        m.config.attn_implementation="eager"
    try:
        e=copy.deepcopy(m); g=copy.deepcopy(m); c=copy.deepcopy(m)
        def stepper(model):
            def step():
                model.zero_grad(set_to_none=True)
                loss(model(*args)).backward()
            return step
        fast=ol.graph(m)
        sf, se = stepper(fast), stepper(e)
        for i in range(8): 
            sf(); se()
        bad=[n for (n,p),q in zip(m.named_parameters(), e.parameters()) if not ((p.grad is None)==(q.grad is None) and (p.grad is None or torch.equal(p.grad,q.grad)))]
        print(name,"params",len(list(m.parameters())),"differ",len(bad), bad[:4], [ (r.replays,r.nodes,r.memory_bytes) for r in fast.recordings])
        print(name,"eager",wall(se))
        print(name,"onelaunch",wall(sf))
        pair=fast.__graphed__._entries[0].captured.pair
        ks=[k for v in pair._kinds.values() for k in v]
        print(name,[(k.eager,k.kept and k.kept.graph.nodes,k.copied is not None) for k in ks], "steals", [int(p.grad is not None and any(p.grad.data_ptr()==t.data_ptr() for t in ks[0].kept._made if t is not None)) for p in list(m.parameters())[:6]])
        with torch.no_grad(): pass
        mg=torch.cuda.make_graphed_callables(g, args)
        print(name,"mgc",wall(stepper(mg)))
        # parts
        y=[None]
        def fwd(): y[0]=fast(*args)
        def onlyf():
            with torch.enable_grad(): fast(*args)
        print(name,"fwd only (dropped)",wall(onlyf))
        if os.environ.get("PROFILE"):
            import cProfile,pstats
            pr=cProfile.Profile(); pr.enable()
            for _ in range(50): sf()
            pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(12)
    except Exception: traceback.print_exc()
