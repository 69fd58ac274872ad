//! What is a difference and what is none.

use crate::text::parse_plan;

use super::{Area, Change, Diff, Meaning, diff};

/// Two layers, their weights gathered over dp, the second while the first computes.
const PLAN: &str =
    "plan @f phase=planned mesh=(dp=2) persistent_bytes=1024 step_bytes=1536 events=6 {
  comm c0 = (dp)
  stream s0 = compute
  stream s1 = comm
  buffer %h.0.w : f32[8, 8] @ [dp, _] param at 0  ; [4, 8]
  buffer %h.1.w : f32[8, 8] @ [dp, _] param at 256  ; [4, 8]
  buffer %x : f32[8, 8] @ [dp, _] input at 512  ; [4, 8]
  buffer %h.0.w.full : f32[8, 8] @ [_, _] temp at 0
  buffer %h.1.w.full : f32[8, 8] @ [_, _] temp at 256
  buffer %h.0.y : f32[8, 8] @ [dp, _] temp at 512  ; [4, 8]
  buffer %h.1.y : f32[8, 8] @ [dp, _] temp at 768  ; [4, 8]
  buffer %h.1.z : f32[8, 8] @ [dp, _] temp at 1024  ; [4, 8]
  buffer %square : f32[] @ [] sum(dp) temp at 1280
  buffer %loss : f32[] @ [] carried at 1280
  param %h.0.w init=Ones
  param %h.1.w
  step:
  s1: %h.0.w.full = all_gather %h.0.w on c0
  s1: record e0
  s1: %h.1.w.full = all_gather %h.1.w on c0
  s1: record e1
  s0: wait e0
  s0: %h.0.y = matmul %x, %h.0.w.full
  s0: wait e1
  s0: %h.1.y = matmul %h.0.y, %h.1.w.full
  s0: %h.1.z = add %h.0.y, %h.1.y
  s0: %square = sum_squares %h.1.z
  s0: record e2
  s1: wait e2
  s1: %loss = all_reduce(sum) %square on c0
  result loss = %loss
}
";

/// The plan once `replace` has been done, in order.
#[track_caller]
fn plan(replace: &[(&str, &str)]) -> Meaning {
    let mut text = PLAN.to_string();
    for (from, to) in replace {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, to);
    }
    Meaning::of(&parse_plan(&text).unwrap_or_else(|it| panic!("{it}\n{text}")))
}

/// What is different then.
#[track_caller]
fn changes(replace: &[(&str, &str)]) -> Diff {
    let (a, b) = (plan(&[]), plan(replace));
    let found = diff(&a, &b);
    // What is kept in a file is as good.
    let kept = Meaning::from_records(a.records()).expect("it is one");
    assert_eq!(diff(&kept, &b).is_empty(), found.is_empty());
    assert_eq!(diff(&b, &b), Diff::default());
    found
}

/// The one change that there is.
#[track_caller]
fn only(replace: &[(&str, &str)]) -> Change {
    let found = changes(replace);
    assert_eq!(found.changes.len(), 1, "{found:#?}");
    found.changes.into_iter().next().expect("there is one")
}

#[test]
fn how_it_is_written_is_no_difference() {
    let none = Diff::default();
    assert_eq!(changes(&[]), none);
    // Other numbers of events, another name of a temporary, another order of listing.
    assert_eq!(changes(&[("e0", "e9"), ("e1", "e0"), ("e9", "e1")]), none);
    assert_eq!(changes(&[("%h.1.z", "%anything")]), none);
    assert_eq!(changes(&[("%h.0.y", "%tmp"), ("%h.1.y", "%h.0.y"), ("%tmp", "%h.1.y")]), none);
    let later = (
        "  s1: %h.1.w.full = all_gather %h.1.w on c0\n  s1: record e1\n  s0: wait e0\n",
        "  s0: wait e0\n  s1: %h.1.w.full = all_gather %h.1.w on c0\n  s1: record e1\n",
    );
    assert_eq!(changes(&[later]), none);
    assert_eq!(
        changes(&[
            (" at 768", " at 1024"),
            ("h.1.z : f32[8, 8] @ [dp, _] temp at 1024", "h.1.z : f32[8, 8] @ [dp, _] temp at 768")
        ]),
        none
    );
}

#[test]
fn an_attribute_is_numerics() {
    let it = only(&[("sum_squares %h.1.z", "sum_squares %h.1.y")]);
    assert_eq!((it.area, it.what, it.of[0].name.as_str()), (Area::Numerics, "made by", "square"));
    let it = only(&[("matmul %h.0.y", "matmul(transpose_b:true) %h.0.y")]);
    assert_eq!((it.area, it.of[0].name.as_str()), (Area::Numerics, "h.1.y"));
    assert_eq!(it.to.as_deref(), Some("matmul(transpose_b:true)"));
}

/// Reading a weight before or after it is written is not the same; the order of other instructions is nothing.
#[test]
fn the_order_of_reads_and_writes_is_numerics() {
    let update = |body: &str| format!("  update:\n{body}  result loss");
    let write = "  s0: %h.1.w = scale(factor:0.5) %h.1.w\n";
    let read = "  s0: %norm = sum_squares %h.1.w\n";
    let other = "  s0: %h.0.w = scale(factor:0.5) %h.0.w\n";
    let buffer = (
        "  param %h.0.w init",
        "  buffer %norm : f32[] @ [] sum(dp) temp at 0\n  param %h.0.w init",
    );
    let of = |parts: [&str; 3]| plan(&[buffer, ("  result loss", &update(&parts.concat()))]);
    let before = of([read, write, other]);
    assert_eq!(diff(&before, &of([other, read, write])), Diff::default());
    let found = diff(&before, &of([write, read, other]));
    let [it] = &found.changes[..] else { panic!("{found:#?}") };
    assert_eq!((it.area, it.of[0].name.as_str()), (Area::Numerics, "norm"));
    assert_eq!(it.to.as_deref(), Some("sum_squares, operand 1 as written anew"));
}

/// A product that adds to what it is added to rounds once.
#[test]
fn fusion_rounds_once() {
    let found = changes(&[
        ("  s0: %h.1.y = matmul %h.0.y, %h.1.w.full\n", ""),
        ("add %h.0.y, %h.1.y", "matmul(accumulate:true) %h.0.y, %h.1.w.full, %h.0.y"),
        ("  buffer %h.1.y : f32[8, 8] @ [dp, _] temp at 768  ; [4, 8]\n", ""),
    ]);
    let rounded: Vec<&Change> = found.changes.iter().filter(|it| it.what == "rounded").collect();
    let [it] = rounded[..] else { panic!("{found:#?}") };
    assert_eq!(it.of[0].name, "h.1.z");
    assert_eq!(it.from.as_deref(), Some("twice, in f32 first as h.1.y"));
    assert_eq!(it.to.as_deref(), Some("once"));
}

/// The second gather waits for the work of the first layer: it is not ahead any more.
#[test]
fn a_gather_that_starts_later_is_schedule() {
    let found = changes(&[
        ("  s1: %h.1.w.full = all_gather %h.1.w on c0\n  s1: record e1\n", ""),
        (
            "  s0: wait e1\n",
            "  s0: record e3\n  s1: wait e3\n  s1: %h.1.w.full = all_gather %h.1.w on c0\n  s1: record e1\n  \
             s0: wait e1\n",
        ),
    ]);
    let schedule: Vec<&Change> =
        found.changes.iter().filter(|it| it.area == Area::Schedule).collect();
    let [it] = schedule[..] else { panic!("{found:#?}") };
    assert_eq!(it.what, "starts after");
    assert_eq!(it.of[0].name, "h.1.w.full");
    assert_eq!((it.from.as_deref(), it.to.as_deref()), (Some("nothing"), Some("h.0.y")));
}

#[test]
fn layers_are_said_once() {
    let found = changes(&[("w.full : f32[8, 8] @ [_, _]", "w.full : bf16[8, 8] @ [_, _]")]);
    let dtypes: Vec<&Change> = found.changes.iter().filter(|it| it.what == "dtype").collect();
    let [it] = dtypes[..] else { panic!("{found:#?}") };
    assert_eq!((it.of[0].name.as_str(), it.of[0].count), ("h.{0..1}.w.full", 2));
    assert_eq!((it.from.as_deref(), it.to.as_deref()), (Some("f32"), Some("bf16")));
}

#[test]
fn a_mesh_is_model_and_bytes_are_totals() {
    let found = changes(&[("mesh=(dp=2)", "mesh=(dp=4)")]);
    assert_eq!(found.changes[0].what, "mesh");
    let gathers = &found.totals[0];
    // 256 bytes each: half of them sent, then three quarters.
    assert_eq!(
        (gathers.kind.as_str(), gathers.from.wire_bytes, gathers.to.wire_bytes),
        ("all_gather", 256, 384)
    );
}

#[test]
fn a_file_folds_layers_and_comes_back() {
    let meaning = Meaning::of(&parse_plan(PLAN).expect("it parses"));
    let records = meaning.records();
    let text: Vec<String> =
        records.iter().map(|it| serde_json::to_string(it).expect("it is JSON")).collect();
    let folded = r#"{"tensor":{"name":"h.{i}.w.full","role":"temp","dtype":"f32","shape":[8,8],"sharding":"[_, _]","bytes":256,"layers":"0..1"}}"#;
    assert!(text.iter().any(|it| it == folded), "{text:#?}");
    let back = text.iter().map(|it| serde_json::from_str(it).expect("it is a record")).collect();
    let back = Meaning::from_records(back).expect("it is one");
    assert_eq!(diff(&meaning, &back), Diff::default());
    assert_eq!(back.records().len(), records.len());
}
