//! What a run leaves for others to look at: traces, event files of TensorBoard, logs in JSON.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::Folder;

/// Lines of JSON.
fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|it| serde_json::from_str(it).unwrap_or_else(|e| panic!("{e}: {it}")))
        .collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Slices of a trace by process and thread, in the order of the file: name, start, end.
type Threads = BTreeMap<(u64, u64), Vec<(String, f64, f64)>>;

#[track_caller]
fn threads(events: &[Value]) -> Threads {
    let mut res = Threads::new();
    for it in events.iter().filter(|it| it["ph"] == "X") {
        let key = (it["pid"].as_u64().expect("a process"), it["tid"].as_u64().expect("a thread"));
        let name = it["name"].as_str().expect("a name").to_string();
        let start = number(&it["ts"]);
        res.entry(key).or_default().push((name, start, start + number(&it["dur"])));
    }
    res
}

fn names(events: &[Value], what: &str) -> BTreeMap<u64, String> {
    let of = events.iter().filter(|it| it["name"] == what);
    of.map(|it| {
        let name = it["args"]["name"].as_str().expect("a name").to_string();
        (it["pid"].as_u64().expect("a process"), name)
    })
    .collect()
}

/// Instructions of these sections of a plan's text, by stream, as a trace names them: the op and the first result.
fn instructions(plan: &str, sections: &[&str]) -> BTreeMap<u64, Vec<String>> {
    let mut res: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for section in sections {
        let body = plan.split(&format!("  {section}:\n")).nth(1).expect("a section");
        for line in body.lines().take_while(|it| it.starts_with("  s")) {
            let (stream, what) = line.trim().split_once(": ").expect("a stream");
            let Some((results, op)) = what.split_once(" = ") else { continue };
            let first = results.split(", ").next().expect("a result");
            let first = first.trim_start_matches(['+', '%']);
            let op = op.split(['(', ' ']).next().expect("an op");
            let stream = stream[1..].parse().expect("a number");
            res.entry(stream).or_default().push(format!("{op} {first}"));
        }
    }
    res
}

#[test]
fn a_trace_has_the_instructions_of_the_plan() {
    let folder = Folder::new("trace", &[]);
    folder.works("compile model.ron --mesh 2 --set micro_batches=2 -o m.plan -q");
    folder.works("run m.plan --steps 3 --trace t.json --trace-steps 2..3");
    let events: Vec<Value> = serde_json::from_str(&folder.read("t.json")).expect("it is JSON");
    let processes = names(&events, "process_name");
    let expected = [(1, "planned (cpu)"), (2, "rank 0 (dp=0)"), (3, "rank 1 (dp=1)")];
    assert_eq!(processes, expected.map(|it| (it.0, it.1.to_string())).into());
    let streams = |pid: u64| -> Vec<&str> {
        let of = events.iter().filter(|it| it["name"] == "thread_name" && it["pid"] == pid);
        of.filter_map(|it| it["args"]["name"].as_str()).collect()
    };
    // Two communicators over one axis.
    let expected = [
        "steps",
        "s0 compute",
        "s1 dp: all_gather of weights",
        "s2 dp: reduce_scatter, all_reduce",
    ];
    assert_eq!((streams(1), streams(2)), (expected.to_vec(), expected.to_vec()));
    let threads = threads(&events);

    let plan = folder.read("m.plan");
    let of_step = instructions(&plan, &["first", "last", "update"]);
    for (pid, steps) in [(1, 1), (2, 2), (3, 2)] {
        for (stream, one) in &of_step {
            let expected = vec![one.clone(); steps].concat();
            let found: Vec<String> =
                threads[&(pid, stream + 1)].iter().map(|it| it.0.clone()).collect();
            assert_eq!(found, expected, "process {pid}, stream {stream}");
        }
        // One after the other on a stream; all within their section, sections within their step.
        let sections = &threads[&(pid, 0)];
        assert_eq!(sections.len(), 4 * steps);
        let inside = |inner: &(String, f64, f64), outer: &(String, f64, f64)| {
            inner.1 >= outer.1 - 0.01 && inner.2 <= outer.2 + 0.01
        };
        for part in sections.chunks(4) {
            let names: Vec<&str> = part[1..].iter().map(|it| it.0.as_str()).collect();
            assert_eq!(names, ["micro-batch 1 of 2", "micro-batch 2 of 2", "update"]);
            assert!(part[0].0.starts_with("step "));
            assert!(part[1..].iter().all(|it| inside(it, &part[0])), "{part:?}");
            assert!(part[1..].windows(2).all(|it| it[0].2 <= it[1].1 + 0.01), "{part:?}");
        }
        for (key, slices) in threads.iter().filter(|it| it.0.0 == pid && it.0.1 > 0) {
            assert!(slices.windows(2).all(|it| it[0].2 <= it[1].1 + 0.01), "{key:?}");
            let sections: Vec<_> =
                sections.iter().filter(|it| !it.0.starts_with("step ")).collect();
            for slice in slices {
                assert!(sections.iter().any(|it| inside(slice, it)), "{key:?}: {slice:?}");
            }
        }
    }
    // Arrows start and end in slices, and go forward.
    let flows = |ph: &str| -> BTreeMap<u64, &Value> {
        let of = events.iter().filter(|it| it["ph"] == ph);
        of.map(|it| (it["id"].as_u64().expect("a number"), it)).collect()
    };
    let (from, to) = (flows("s"), flows("f"));
    assert!(from.len() > 20 && from.keys().eq(to.keys()));
    for (id, from) in from {
        assert!(number(&from["ts"]) <= number(&to[&id]["ts"]) + 0.01, "{from} {}", to[&id]);
    }
    let memory =
        events.iter().filter(|it| it["ph"] == "C").map(|it| number(&it["args"]["temporary"]));
    assert!(memory.fold(0.0, f64::max) > 1000.0);
    let gemm = events.iter().find(|it| it["name"] == "matmul lm_head.logits.grad");
    let gemm =
        gemm.or(events.iter().find(|it| it["args"]["flops"].as_u64() > Some(0))).expect("a GEMM");
    assert!(number(&gemm["args"]["bytes"]) > 0.0 && gemm["args"]["reads"].is_array(), "{gemm}");
    let gather = events.iter().find(|it| it["cat"] == "collective").expect("a collective");
    assert_eq!(gather["args"]["axes"], "dp");
}

/// By default, the last step; and what there is if the run ends early.
#[test]
fn a_trace_is_written_when_a_run_fails() {
    let folder = Folder::new("trace_failed", &[("vocab: 256", "vocab: 128")]);
    let steps = |events: &[Value]| -> Vec<String> {
        let of = events.iter().filter(|it| it["cat"] == "step" && it["pid"] == 2);
        of.filter_map(|it| Some(it["name"].as_str()?.to_string())).collect()
    };
    folder.works("run model.ron --mesh 2 --steps 2 --trace t.json");
    let read =
        || -> Vec<Value> { serde_json::from_str(&folder.read("t.json")).expect("it is JSON") };
    assert_eq!(steps(&read()), ["step 2", "micro-batch 1 of 1", "update"]);
    // The second batch has tokens beyond the vocabulary.
    folder.write("data.bin", [vec![1_u8; 300], vec![200; 500]].concat());
    let data = "--data data.bin --token-type u8 --trace-steps 1..3 --log-format json";
    let ran = folder.planc(&format!("run model.ron --mesh 2 --steps 2 {data} --trace t.json"));
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    let events = read();
    assert_eq!(steps(&events), ["step 1", "micro-batch 1 of 1", "update"]);
    let end = events.last().and_then(|it| it["name"].as_str()).expect("an event");
    assert!(end.starts_with("the run ended: ") && end.contains("200"), "{end}");
    let log = lines(&ran.stdout).pop().expect("a line");
    assert_eq!(log["event"], "error");
    assert!(ran.stderr.contains(log["code"].as_str().expect("a code")), "{}", ran.stderr);

    let ran = folder.planc("run model.ron --mesh 2 --trace missing/t.json");
    assert!(ran.code == 1 && ran.stderr.contains("missing/t.json"), "{}", ran.stderr);
    for (steps, why) in
        [("5..3", "5 is behind 3"), ("0", "steps count from 1"), ("a", "is no step")]
    {
        let ran =
            folder.planc(&format!("run model.ron --mesh 2 --trace t.json --trace-steps {steps}"));
        assert!(ran.code == 2 && ran.stderr.contains(why), "{}", ran.stderr);
    }
    let ran = folder.planc("run model.ron --mesh 2 --trace t.json --target h900");
    assert!(ran.code == 1 && ran.stderr.contains("PL0650"), "{}", ran.stderr);
}

/// Events of a file, by a reader that knows the format and nothing of planc.
#[track_caller]
fn events(file: &Path) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/events.py");
    let python = Command::new("python3").arg(script).arg(file).output().expect("python3 starts");
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
    lines(&String::from_utf8_lossy(&python.stdout))
}

/// Files of a folder, in the order in which TensorBoard reads them.
fn event_files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut res: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").map(|it| it.expect("a file").path()).collect();
    res.sort();
    res
}

#[test]
fn event_files_say_what_metrics_say() {
    let folder = Folder::new("tensorboard", &[]);
    let run = "run model.ron --mesh 2 --tensorboard logs/run --save ckpt";
    folder.works(&format!("{run} --steps 3 --metrics a.jsonl"));
    let logs = folder.0.join("logs/run");
    let [file] = &event_files(&logs)[..] else { panic!("one file") };
    assert!(
        file.file_name().is_some_and(|it| it.to_string_lossy().starts_with("events.out.tfevents."))
    );
    let found = events(file);
    assert_eq!((&found[0]["version"], found.len()), (&json!("brain.Event:2"), 4));
    let check = |events: &[Value], metrics: &str| {
        let metrics = lines(&folder.read(metrics));
        assert_eq!(events.len(), metrics.len());
        for (event, line) in events.iter().zip(&metrics) {
            assert_eq!(event["step"], line["step"]);
            assert!(number(&event["wall_time"]) > 1.7e9);
            let scalars = event["scalars"].as_object().expect("scalars");
            let tags: Vec<&str> = scalars.keys().map(String::as_str).collect();
            assert_eq!(tags, ["grad_norm", "loss", "lr", "memory_bytes", "tokens_per_s"]);
            for (tag, value) in scalars {
                assert_eq!(number(value) as f32, number(&line[tag]) as f32, "{tag}");
            }
        }
    };
    check(&found[1..], "a.jsonl");

    // Going on from step 3: a new file, which says that it starts at step 4.
    folder.works(&format!("{run} --steps 5 --metrics b.jsonl --resume"));
    let files = event_files(&logs);
    assert_eq!(files.len(), 2);
    let new = files.iter().find(|it| *it != file).expect("a new one");
    let found = events(new);
    assert_eq!((&found[1]["session"], &found[1]["step"]), (&json!(1), &json!(4)));
    let steps: Vec<u64> = found[2..].iter().filter_map(|it| it["step"].as_u64()).collect();
    assert_eq!(steps, [4, 5]);
    check(&found[2..], "b.jsonl");
}

#[test]
fn a_log_in_json_is_an_object_a_line() {
    let folder = Folder::new("log_json", &[]);
    let run = "run model.ron --mesh 2 --log-format json --save ckpt --save-every 2";
    let log = lines(&folder.works(&format!("{run} --steps 4 --metrics m.jsonl")));
    let events: Vec<&str> = log.iter().filter_map(|it| it["event"].as_str()).collect();
    assert_eq!(events, ["start", "step", "step", "saved", "step", "step", "saved", "summary"]);
    assert_eq!((&log[0]["ranks"], &log[0]["weights"]), (&json!(2), &json!("random")));
    // A line of a step is a line of --metrics.
    let mut step = log[1].clone();
    step.as_object_mut().expect("an object").remove("event");
    let metrics = lines(&folder.read("m.jsonl"));
    assert_eq!(step, metrics[0]);
    let fields: Vec<&String> = metrics[0].as_object().expect("an object").keys().collect();
    assert_eq!(
        fields,
        ["grad_norm", "loss", "lr", "memory_bytes", "seconds", "step", "tokens", "tokens_per_s"]
    );
    // Going back behind what was saved.
    let log = lines(&folder.works(&format!("{run} --steps 3 --load ckpt/step-2")));
    let events: Vec<&str> = log.iter().filter_map(|it| it["event"].as_str()).collect();
    assert_eq!(events, ["start", "loaded", "rolled_back", "step", "saved", "summary"]);
    assert_eq!((&log[1]["step"], &log[2]["steps"]), (&json!(2), &json!([4])));
    let log = lines(
        &folder.works("run model.ron --mesh 1 --log-format json --steps 2 --set schedule.lr=1e30"),
    );
    assert!(log.iter().any(|it| it["event"] == "warning"), "{log:?}");
}

/// Files that are read, or that two options name, are not written over; nor are those of a checkpoint.
#[test]
fn what_is_read_is_not_written_over() {
    let folder = Folder::new("log_over_inputs", &[]);
    folder.works("compile model.ron --mesh 1 -q");
    folder.works("run model.plan --steps 1 --save ckpt -q");
    folder.write("tokens.bin", [1; 4096]);
    folder.write("cpu.ron", std::fs::read(crate::workspace("ir/profiles/cpu.ron")).unwrap());
    std::fs::hard_link(folder.0.join("model.plan"), folder.0.join("other.plan")).unwrap();
    for line in [
        "run model.plan --steps 1 --trace model.plan",
        "run model.plan --steps 1 --metrics other.plan",
        "run model.ron --mesh 1 --steps 1 --trace model.ron",
        "run model.plan --steps 1 --data tokens.bin --token-type u8 --metrics tokens.bin",
        "run model.plan --steps 1 --trace cpu.ron --target cpu.ron",
        "run model.plan --steps 1 --trace ckpt/step-1/.metadata",
        "run model.plan --steps 1 --trace same.json --metrics same.json",
    ] {
        let ran = folder.planc(line);
        assert!(ran.code == 1 && ran.stderr.contains("PL0613"), "{line}: {}", ran.stderr);
    }
    assert_eq!(folder.read("tokens.bin").len(), 4096);
    folder.works("verify model.plan");
    folder.works("ckpt verify ckpt");
}

#[test]
fn steps_to_trace_that_are_not_run_are_a_warning() {
    let folder = Folder::new("log_trace_steps", &[]);
    let ran = folder.planc("run model.ron --mesh 1 --steps 2 --trace t.json --trace-steps 3..4");
    let said = "none of the steps to trace is run: these are steps 1 to 2";
    assert!(ran.code == 0 && ran.stderr.contains(said), "{}", ran.stderr);
}
