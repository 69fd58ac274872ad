use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let source = std::fs::read_to_string(&args[1]).unwrap();
    let mesh = ir::model::MeshSpec::parse(&args[2]).unwrap();
    let model = ir::model::parse_with(&source, &[]).unwrap();
    for _ in 0..3 {
        let graph = ir::model::elaborate(&model, &mesh).unwrap();
        let t = Instant::now();
        let c = match codegen::compile(graph, &Default::default()) {
            Ok(c) => c,
            Err(e) => {
                println!("ERR {}", e.to_string().chars().take(4000).collect::<String>());
                return;
            }
        };
        println!("total {:?}", t.elapsed());
        for t in &c.times {
            println!("  {:?}", t);
        }
        for _ in 0..3 {
            let t = Instant::now();
            assert!(ir::verify::plan::verify(&c.plan).is_empty());
            println!("verify {:?}", t.elapsed());
        }
        println!(
            "insts {:?} buffers {}",
            c.plan.sections.iter().map(|s| s.len()).collect::<Vec<_>>(),
            c.plan.buffers.len()
        );
        let p = ir::plan::memory_profile(&c.plan);
        println!(
            "persistent {} MB step {} MB live {} MB peak {:?}",
            p.persistent_bytes >> 20,
            p.step_bytes >> 20,
            p.live_bytes >> 20,
            p.peak
        );
        for (b, n) in &p.largest {
            println!("   {} {} MB", c.plan.buffers[*b].name, n >> 20);
        }
    }
}
