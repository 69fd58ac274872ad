export HOME=/tmp/home; mkdir -p $HOME; export PLANC=$PWD/target/planc
export PYTHONUNBUFFERED=1
# kill debug
cat > /tmp/kill.sh <<'X'
run() { RANK=$1 WORLD_SIZE=2 LOCAL_RANK=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29611 $PLANC run examples/llama-tiny.ron --mesh 2 --device cuda --steps 1000000 --log-every 1000 > /tmp/r$1.txt 2>&1 & }
run 0; P0=$!; run 1; P1=$!
sleep 12; tail -2 /tmp/r0.txt
kill -9 $P1; sleep 6; tail -5 /tmp/r0.txt
if kill -0 $P0 2>/dev/null; then echo "rank 0 alive after 6 s"; timeout 60 cuda-gdb -p $P0 -batch -ex "set pagination off" -ex "thread apply all bt 14" 2>&1 | grep -v "^\[New\|warning\|^Reading\|no debugging" | tail -150 > $OUT/bt.txt; grep -c . $OUT/bt.txt; fi
kill -9 $P0
X
bash /tmp/kill.sh
B="$PLANC bench examples/llama3-8b.ron --mesh 2x1 --device cuda --set sequence=8192 --set precision.reduce=f32 --set batch=Global(2) --set layers[1].n=8 --steps 8 --warmup 3 -v"
one() { echo "== $1"; shift; env "$@" timeout 100 $B > $OUT/last.txt 2>&1; head -16 $OUT/last.txt | grep -v "^$"; grep -E "attention|all_gather|reduce_scatter" $OUT/last.txt | cut -c1-100; }
one base A=1
one packed PLANC_X_PACKED=1 XDG_CACHE_HOME=/tmp/c2
one windows PLANC_X_PACKED=1 XDG_CACHE_HOME=/tmp/c2 PLANC_NCCL_WINDOWS=1
