export HOME=/tmp/home; mkdir -p $HOME; P=$PWD/target/planc
(time timeout 120 $P doctor --check) > $OUT/check.txt 2>&1; tail -15 $OUT/check.txt | cut -c1-250; grep -c WRONG $OUT/check.txt; grep WRONG $OUT/check.txt | cut -c1-250 | head -20
timeout 60 $P run examples/llama-tiny.ron --mesh 1 --device cuda --steps 2 --compare cpu 2>&1 | tail -20
timeout 60 $P run examples/llama-tiny.ron --mesh 1 --device cuda --steps 2 --compare cpu --set "precision=(compute: bf16, reduce: f32)" 2>&1 | tail -20
timeout 120 python3 bench/golden.py $P 1
time timeout 200 $P bench examples/llama3-8b.ron --mesh 1 --device cuda --set sequence=8192 --set precision.reduce=f32 --set 'batch=Global(1)' --set 'layers[1].n=8' 2>&1 | tee $OUT/bench.txt
