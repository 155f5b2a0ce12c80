import copy, sys, time, statistics as st, torch, os
from torch import nn
import onelaunch as ol
from examples import workloads
torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
def wall(f, n=60, rounds=5):
    for _ in range(12): f()
    torch.cuda.synchronize(); out=[]; host=[]
    for _ in range(rounds):
        t=time.perf_counter()
        for _ in range(n): f()
        h=time.perf_counter()-t
        torch.cuda.synchronize(); out.append((time.perf_counter()-t)/n*1e6); host.append(h/n*1e6)
    return round(st.median(out),1), round(st.median(host),1)
def load(name):
    m,args=workloads.WORKLOADS[name]()
    m=m.train().requires_grad_(True)
    for mm in m.modules():
        if isinstance(mm, nn.Dropout): mm.p=0.0
    return m,args
def loop(call, mod, args, sync=None):
    ps=list(mod.parameters())
    def f():
        y=call(*args); y=y if torch.is_tensor(y) else (y[0] if isinstance(y,tuple) else y["last_hidden_state"])
        y.sum().backward()
        for p in ps: p.grad=None
    return f
for name in ("mlp","cnn"):
    m,args=load(name); e=copy.deepcopy(m); g=copy.deepcopy(m)
    fast=ol.graph(m); s=loop(fast,m,args)
    print(name,"eager",wall(loop(e,e,args)))
    print(name,"onelaunch",wall(s))
    mg=torch.cuda.make_graphed_callables(g,args); print(name,"mgc",wall(loop(mg,g,args)))
    entry=fast.__graphed__._entries[0]; pair=entry.captured.pair
    k=[k for v in pair._kinds.values() for k in v][0]
    def fwd():
        fast(*args)
    print(name,"F in grad mode, dropped",wall(fwd))
    noop=lambda a,b: None
    class G:
        launch=staticmethod(noop)
    real=k.kept.graph; k.kept.graph=G
    print(name,"B launch noop",wall(s))
    gl=entry.call.__globals__; saved={n:v for n,v in gl.items() if n.startswith("launch") and callable(v)}
    for n in saved: gl[n]=noop
    print(name,"F and B launch noop",wall(s)); print(name,"F noop, grad mode",wall(fwd))
    k.kept.graph=real; gl.update(saved)
    ps=list(m.parameters()); outs=[torch.empty_like(p) for p in ps]
    class N(torch.autograd.Function):
        @staticmethod
        def forward(ctx,made,*a): return made
        @staticmethod
        def backward(ctx,*gg): return (None,*[o.detach() for o in outs])
    class N1(torch.autograd.Function):
        @staticmethod
        def forward(ctx,made,a): return made
        @staticmethod
        def backward(ctx,*gg): return None,None
    d=torch.zeros(1,device="cuda",requires_grad=True)
    print(name,"minimal node, params",wall(loop(lambda *a: N.apply((torch.empty(32,10,device="cuda"),),*ps),m,args)))
    print(name,"minimal node, one input",wall(loop(lambda *a: N1.apply((torch.empty(32,10,device="cuda"),),d),m,args)))
    q=torch.zeros(32,10,device="cuda",requires_grad=True)
    print(name,"loss alone",wall(loop(lambda *a: q*1,m,args)))
    print(name,"apply alone",wall(lambda: N.apply((torch.empty(32,10,device="cuda"),),*ps)))
    print(name,"pair.backward alone",)
    gg=torch.ones((),device="cuda").expand(entry.captured.pair.static.outputs[0].shape)
    for p in ps: p.grad=None
    print(name, wall(lambda: pair.backward((gg,))))
def kernels(f):
    from torch.profiler import profile, ProfilerActivity
    for _ in range(8): f()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3): f()
        torch.cuda.synchronize()
    rows={}
    for ev in prof.key_averages(): rows[ev.key]=(ev.count, ev.self_device_time_total)
    return rows
m,args=load("resnet50"); g=copy.deepcopy(m)
fast=ol.graph(m); s=loop(fast,m,args); print("resnet onelaunch",wall(s,20))
mg=torch.cuda.make_graphed_callables(g,args); sm=loop(mg,g,args); print("resnet mgc",wall(sm,20))
a,b=kernels(s),kernels(sm)
print("total kernels", sum(v[0] for v in a.values()), sum(v[0] for v in b.values()), "time", sum(v[1] for v in a.values())/3, sum(v[1] for v in b.values())/3)
diff=sorted(set(a)|set(b), key=lambda k:-abs(a.get(k,(0,0))[1]-b.get(k,(0,0))[1]))[:16]
for k in diff: print(k[:90], a.get(k), b.get(k))
