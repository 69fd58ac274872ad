//! scratch
use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let source = std::fs::read_to_string(&args[1]).unwrap();
    let mesh = ir::model::MeshSpec::parse(&args[2]).unwrap();
    let overrides: Vec<(&str, &str)> =
        args[4..].iter().map(|it| it.split_once('=').unwrap()).collect();
    let model = ir::model::parse_with(&source, &overrides).unwrap();
    for _ in 0..3 {
        let t = Instant::now();
        let graph = ir::model::elaborate(&model, &mesh).unwrap();
        let e = t.elapsed();
        let options = codegen::Options { dump_after: vec![args[3].clone()], ..Default::default() };
        match codegen::compile(graph, &options) {
            Ok(c) => {
                for d in &c.dumps {
                    println!("{d}");
                }
                println!(
                    "{}",
                    serde_json::to_string_pretty(&ir::summary::Summary::of(&c.plan)).unwrap()
                );
                println!("elaborate {e:?} total {:?}", t.elapsed());
                for t in &c.times {
                    println!("  {:?}", t);
                }
                println!(
                    "insts {:?} buffers {}",
                    c.plan.sections.iter().map(|s| s.len()).collect::<Vec<_>>(),
                    c.plan.buffers.len()
                );
            }
            Err(e) => {
                for d in &e.dumps {
                    println!("{d}");
                }
                println!("ERR {e}");
            }
        }
    }
}
