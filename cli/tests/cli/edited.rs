//! Plans that somebody edited: refused with exit code 1, never run, never a panic.

use crate::{Folder, position};

/// A folder with `model.plan` for a small mesh, and its text.
#[track_caller]
fn compiled(test: &str) -> (Folder, String) {
    let folder = Folder::new(test, &[]);
    folder.works("compile model.ron --mesh 2x2 -q");
    let plan = folder.read("model.plan");
    (folder, plan)
}

/// The lines after `edit` must be refused; the report.
#[track_caller]
fn check(test: &str, edit: impl Fn(&mut Vec<String>)) -> String {
    let folder = Folder::new(test, &[]);
    folder.edit("2x2", edit);
    let inspected = folder.planc("inspect edited.plan");
    assert_eq!((inspected.code, inspected.stdout.as_str()), (1, ""), "{}", inspected.stderr);
    let ran = folder.planc("run edited.plan --steps 1");
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{}", ran.stderr);
    ran.stderr
}

#[test]
fn a_deleted_all_reduce() {
    let report = check("deleted_all_reduce", |lines| {
        let at = position(lines, |it| it.contains(" = all_reduce(sum) %loss.sum"));
        lines.remove(at);
    });
    insta::assert_snapshot!("deleted_all_reduce", report);
}

#[test]
fn any_deleted_all_reduce() {
    let (folder, plan) = compiled("any_deleted_all_reduce");
    for (deleted, _) in plan.lines().enumerate().filter(|it| it.1.contains(" = all_reduce(")) {
        let lines = plan.lines().enumerate().filter(|it| it.0 != deleted);
        let lines: Vec<&str> = lines.map(|it| it.1).collect();
        folder.write("edited.plan", lines.join("\n"));
        let ran = folder.planc("inspect edited.plan");
        assert_eq!(ran.code, 1, "without line {}: {}", deleted + 1, ran.stderr);
    }
}

/// More scratch than anything needs would be counted, and allocated.
#[test]
fn scratch_that_nothing_needs() {
    let report = check("scratch_that_nothing_needs", |lines| {
        let at = position(lines, |it| it.contains("workspace="));
        let (before, _) = lines[at].split_once("workspace=").expect("it has some");
        lines[at] = format!("{before}workspace=18446744073709551360");
    });
    assert!(report.contains("none needs more than"), "{report}");
}

#[test]
fn a_deleted_wait() {
    let report = check("deleted_wait", |lines| {
        let at = position(lines, |it| it.contains(": wait e0"));
        lines.remove(at);
    });
    assert!(report.contains("races with"), "{report}");
}

#[test]
fn an_instruction_before_its_inputs() {
    check("before_its_inputs", |lines| {
        let at = position(lines, |it| it.starts_with("  s0: ") && it.contains(" = embedding "));
        lines.swap(at, at + 1);
    });
}

#[test]
fn a_temporary_over_another() {
    check("temporary_over_another", |lines| {
        let at = position(lines, |it| it.contains("%model.layers.0.input_layernorm.weight.full :"));
        lines[at] = lines[at].replace("temp at 32768", "temp at 0");
    });
}

#[test]
fn another_shape() {
    check("another_shape", |lines| {
        let at = position(lines, |it| it.contains("%model.norm.weight.full :"));
        lines[at] = lines[at].replace("f32[64]", "f32[128]");
    });
}

#[test]
fn another_op() {
    check("another_op", |lines| {
        let at = position(lines, |it| it.contains(" = embedding "));
        lines[at] = lines[at].replace(" = embedding ", " = mul ");
    });
}

#[test]
fn any_op_without_operands() {
    let folder = Folder::new(
        "without_operands",
        &[("sequence: 32,", "sequence: 32, precision: (compute: bf16),")],
    );
    folder.works("compile model.ron --mesh 2x2 -q");
    let plan = folder.read("model.plan");
    let mut seen: Vec<&str> = Vec::new();
    for line in plan.lines().filter(|it| it.starts_with("  s") && it.contains(" = ")) {
        let (_, op) = line.split_once(" = ").expect("it makes something");
        let Some((op, operands)) = op.split_once(" %") else { continue };
        if seen.contains(&op) {
            continue;
        }
        seen.push(op);
        let edited = line.replacen(&format!(" %{operands}"), "", 1);
        folder.write("edited.plan", plan.replacen(line, &edited, 1));
        let ran = folder.planc("verify edited.plan");
        assert_eq!(ran.code, 1, "{edited}: {}", ran.stderr);
    }
    assert!(seen.contains(&"cast(to:bf16)"), "{seen:?}");
}

/// Any single character may be replaced: the plan is refused, or it is still a plan.
#[test]
fn no_edit_makes_planc_panic() {
    let (folder, plan) = compiled("no_edit_panics");
    let mut state = 7_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    let letters = b"0123456789abcxyz%@[](){}.,:=_ \n-;\"";
    for i in 0..200 {
        let mut bytes = plan.clone().into_bytes();
        let at = random(bytes.len());
        bytes[at] = letters[random(letters.len())];
        folder.write("edited.plan", &bytes);
        let ran = folder.planc("inspect edited.plan --memory");
        let what = format!("edit {i}: byte {at} is {:?}", bytes[at] as char);
        assert!(matches!(ran.code, 0 | 1), "{what}: {} {}", ran.code, ran.stderr);
    }
}

#[test]
fn an_edited_graph() {
    let folder = Folder::new("edited_graph", &[]);
    folder.works("compile model.ron --mesh 2x2 --emit logical -o model.ir");
    let graph = folder.read("model.ir");
    let edited = graph.replacen(" = embedding ", " = mul ", 1);
    assert_ne!(edited, graph);
    folder.write("model.ir", edited);
    let ran = folder.planc("compile model.ir");
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{}", ran.stderr);
}
