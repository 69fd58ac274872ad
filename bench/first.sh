export HOME=/tmp/home; mkdir -p $HOME; export PLANC=$PWD/target/planc
export PYTHONUNBUFFERED=1
B="$PLANC bench examples/llama3-8b.ron --mesh 2x1 --device cuda --set sequence=8192 --set precision.reduce=f32 --set batch=Global(2) --set layers[1].n=8 --steps 8 --warmup 3 -v"
one() { echo "== $1"; shift; env "$@" timeout 100 $B > $OUT/last.txt 2>&1; head -16 $OUT/last.txt | grep -E "step|GEMM|exposed|in all|CUDA and"; grep -E "attention|all_gather|reduce_scatter" $OUT/last.txt | cut -c1-70 | head -4; }
one base A=1
grep -l fwd -r $HOME/.cache/planc 2>/dev/null | head; for f in $(ls -t $HOME/.cache/planc/* -d); do echo $f; done
python3 - <<'X'
import glob,json,re,os
for f in glob.glob(os.environ["HOME"]+"/.cache/planc/**/*", recursive=True):
    if os.path.isfile(f) and os.path.getsize(f) > 20000:
        t=open(f,errors="replace").read()
        if "engineId" in t: print(os.path.basename(f)[:40], set(re.findall(r'engineId\\?"\s*:\s*\d+', t)), set(re.findall(r'CUDNN_KNOB_TYPE_\w+\\?"\s*:\s*-?\d+', t)))
X
one ctas8 PLANC_NCCL_CTAS=8
one ctas4 PLANC_NCCL_CTAS=4
one ctas16 PLANC_NCCL_CTAS=16
one windows8 PLANC_NCCL_CTAS=8 PLANC_NCCL_WINDOWS=1
python3 - <<'X'
s=open("bench/peers/llama.py").read()
s=s.replace("for i in range(a.steps):\n","import torch.profiler as tp\nprof=tp.profile(activities=[tp.ProfilerActivity.CUDA])\nfor i in range(a.steps):\n    if i==7: prof.__enter__()\n    if i==8: prof.__exit__(None,None,None)\n",1)
s=s.replace("if r == 0: print(f\"RESULT","if r == 0:\n  for e in sorted(prof.key_averages(), key=lambda e:-e.device_time_total)[:22]: print(f'{e.device_time_total/1e3:9.2f} ms {e.count:5} x {e.key[:110]}')\n  print(f\"RESULT",1)
open("/tmp/llama_prof.py","w").write(s)
X
timeout 100 torchrun --nproc_per_node 2 /tmp/llama_prof.py --layers 8 2>&1 | grep -E " ms |RESULT|Error" | cut -c1-170
