//! How differences are drawn: `-` before, `+` after, layers folded.

use ir::meaning::{Area, Change, Diff, Meaning, Program, Subject, Total, TotalChange};
use ir::model::axes_text;
use serde::Serialize;

use crate::report::{Paint, Ui};
use crate::table::{Align, Table, WIDTH, bytes, plural, wrapped};

/// Subjects of one change that are named, and changes of one property, unless all are asked for.
const SHOWN: usize = 4;

/// What is printed; its JSON form is `--format json`.
#[derive(Debug, Serialize)]
pub struct View {
    /// Whether there is no difference in meaning.
    pub same: bool,
    first: PlanView,
    second: PlanView,
    #[serde(flatten)]
    diff: Diff,
}

#[derive(Debug, Serialize)]
struct PlanView {
    name: String,
    mesh: String,
    /// The file, and options.
    source: String,
}

impl PlanView {
    fn of(program: &Program, source: String) -> PlanView {
        let mesh = axes_text(program.mesh.iter().map(|it| (&it.0, it.1)), " x ");
        PlanView { name: program.name.clone(), mesh, source }
    }
}

impl View {
    /// What there is to say about two plans.
    pub fn of(a: &Meaning, b: &Meaning, diff: Diff, sources: [String; 2]) -> View {
        let [first, second] = sources;
        let (first, second) = (PlanView::of(&a.program, first), PlanView::of(&b.program, second));
        View { same: diff.is_empty(), first, second, diff }
    }

    /// As text.
    pub fn text(&self, ui: &Ui) -> String {
        let PlanView { name, mesh, .. } = &self.first;
        if self.same {
            return format!("{name} on {mesh}: no difference in meaning\n");
        }
        let paint = ui.paint();
        let head = |it: &PlanView| format!("{} on {}", it.name, it.mesh);
        let alike = head(&self.first) == head(&self.second);
        let source = |it: &PlanView| if alike { format!(": {}", it.source) } else { String::new() };
        let line = |it: &PlanView| head(it) + &source(it);
        let mut res = format!("- {}\n+ {}\n", line(&self.first), line(&self.second));
        for area in AREAS {
            let changes: Vec<&Change> =
                self.diff.changes.iter().filter(|it| it.area == area).collect();
            let totals = if area == Area::Collectives { &self.diff.totals[..] } else { &[] };
            if changes.is_empty() && totals.is_empty() {
                continue;
            }
            res.push_str(&format!("\n{}\n", paint.bold(heading(area))));
            res.push_str(&totals_text(totals));
            for same in changes.chunk_by(|a, b| a.what == b.what) {
                let shown = if ui.verbose { same.len() } else { same.len().min(SHOWN) };
                for change in &same[..shown] {
                    res.push_str(&change_text(change, ui.verbose, paint));
                }
                if same.len() > shown {
                    let rest = plural((same.len() - shown) as u64, "change");
                    res.push_str(&format!("  {}: {rest} more; -v shows all\n", same[0].what));
                }
            }
        }
        res
    }
}

const AREAS: [Area; 6] =
    [Area::Model, Area::Placement, Area::Numerics, Area::Collectives, Area::Memory, Area::Schedule];

fn heading(area: Area) -> &'static str {
    match area {
        Area::Model => "model",
        Area::Placement => "placement",
        Area::Numerics => "numerics",
        Area::Collectives => "collectives",
        Area::Memory => "memory",
        Area::Schedule => "schedule",
    }
}

fn change_text(change: &Change, all: bool, paint: Paint) -> String {
    let mut res = String::new();
    let what = change.what.trim_end_matches(" bytes");
    let shown = if all { change.of.len() } else { change.of.len().min(SHOWN) };
    match &change.of[..shown] {
        [] => res.push_str(&format!("  {what}\n")),
        subjects => {
            let mut names: Vec<String> = subjects.iter().map(subject_text).collect();
            if change.of.len() > shown {
                let rest: usize = change.of[shown..].iter().map(|it| it.count).sum();
                names.push(format!("and {} more", plural(rest as u64, "tensor")));
            }
            let mut label = format!("{what}: ");
            for name in names {
                res.push_str(&format!("  {label}{name}\n"));
                label = " ".repeat(what.len() + 2);
            }
        }
    }
    // Numbers of bytes in short, unless that hides the difference.
    let text = |it: &Option<String>| match change.area {
        Area::Memory => it.as_ref().map(|it| it.parse().map_or_else(|_| it.clone(), bytes)),
        _ => it.clone(),
    };
    let mut sides = (text(&change.from), text(&change.to));
    if sides.0 == sides.1 {
        let exact = |it: &Option<String>| it.as_ref().map(|it| format!("{it} B"));
        sides = (exact(&change.from), exact(&change.to));
    }
    let lines = |sign: char, text: Option<String>| -> Vec<String> {
        let lines = wrapped(&text.unwrap_or_default(), WIDTH - 6);
        let line =
            |(i, it): (usize, &String)| format!("    {} {it}", if i == 0 { sign } else { ' ' });
        lines.iter().enumerate().map(line).collect()
    };
    lines('-', sides.0).iter().for_each(|it| res.push_str(&format!("{}\n", paint.red(it))));
    lines('+', sides.1).iter().for_each(|it| res.push_str(&format!("{}\n", paint.green(it))));
    res
}

fn subject_text(subject: &Subject) -> String {
    match subject.count {
        1 => subject.name.clone(),
        n => format!("{}  x{n}", subject.name),
    }
}

fn totals_text(totals: &[TotalChange]) -> String {
    if totals.is_empty() {
        return String::new();
    }
    let mut table =
        Table::new(2, &[Align::Left, Align::Left, Align::Right, Align::Right, Align::Right]);
    table.row(["over", "kind", "calls", "bytes", "sent"].map(str::to_string));
    let pair = |a: String, b: String| if a == b { a } else { format!("{a} -> {b}") };
    let row = |over: &str, kind: &str, from: &Total, to: &Total| {
        [
            over.to_string(),
            kind.to_string(),
            pair(from.count.to_string(), to.count.to_string()),
            pair(bytes(from.bytes), bytes(to.bytes)),
            pair(bytes(from.wire_bytes), bytes(to.wire_bytes)),
        ]
    };
    for it in totals.iter().filter(|it| it.from != it.to) {
        table.row(row(&it.over, &it.kind, &it.from, &it.to));
    }
    let sum = |of: fn(&TotalChange) -> Total| {
        totals.iter().map(of).fold(Total::default(), |sum, it| Total {
            count: sum.count + it.count,
            bytes: sum.bytes + it.bytes,
            wire_bytes: sum.wire_bytes + it.wire_bytes,
        })
    };
    table.row(row("all", "", &sum(|it| it.from), &sum(|it| it.to)));
    table.text()
}
