//! What the planner moves because shardings disagree, what it leaves unquantized, and how FSDP cuts weights in
//! blocks; layers folded.

use ir::graph::{Cut, Move};
use ir::placement::Mesh;
use serde_json::json;

use crate::table::{Align, Table, elided};
use crate::words::fold;

/// A table of moves; those that differ in numbers of layers only are one line with a count.
pub fn table(moves: &[Move], mesh: &Mesh) -> String {
    let lines = moves.iter().map(|it| {
        let (from, to) = (it.from.display(mesh), it.to.display(mesh));
        let reader = match it.reader == it.value {
            true => String::new(),
            false => format!("for {}", fold(&it.reader)),
        };
        [fold(&it.value), format!("{from} -> {to} {reader}")]
    });
    if moves.is_empty() {
        String::new()
    } else {
        counted("moved because shardings disagree", lines)
    }
}

/// A table of what a recipe wants quantized and is not; nothing if there is nothing.
pub fn unquantized(gemms: &[(String, String)]) -> String {
    match gemms {
        [] => String::new(),
        _ => counted("not quantized", gemms.iter().map(|it| [fold(&it.0), fold(&it.1)])),
    }
}

/// A table of weights in blocks that even cuts would part, and what was cheaper; nothing if there are none.
pub fn cuts(cuts: &[Cut], mesh: &Mesh) -> String {
    let line = |it: &Cut| {
        let (even, rounded) = (it.even.display(mesh), it.rounded.display(mesh));
        let share = it.seconds[1] / it.seconds[0];
        let text = match it.is_rounded() {
            true => format!("{rounded}, gathered as codes: {share:.2} of the time of {even}"),
            false => {
                format!("{even}, quantized when gathered; {rounded} would take {share:.2} of it")
            }
        };
        [fold(&it.weight), text]
    };
    match cuts {
        [] => String::new(),
        _ => counted("weights in blocks that an even cut parts", cuts.iter().map(line)),
    }
}

/// All of them, for a program.
pub fn cuts_json(cuts: &[Cut], mesh: &Mesh) -> serde_json::Value {
    let one = |it: &Cut| {
        json!({
            "weight": it.weight,
            "even": { "sharding": it.even.display(mesh).to_string(), "seconds": it.seconds[0] },
            "rounded": { "sharding": it.rounded.display(mesh).to_string(), "seconds": it.seconds[1] },
            "is_rounded": it.is_rounded(),
        })
    };
    cuts.iter().map(one).collect()
}

/// Lines under a title, equal ones with their count.
fn counted(title: &str, lines: impl Iterator<Item = [String; 2]>) -> String {
    let mut folded: Vec<(usize, [String; 2])> = Vec::new();
    for line in lines {
        match folded.iter_mut().find(|it| it.1 == line) {
            Some(known) => known.0 += 1,
            None => folded.push((1, line)),
        }
    }
    let mut table = Table::new(2, &[Align::Right, Align::Left, Align::Left]);
    for (count, [value, text]) in folded {
        table.row([format!("{count} x"), elided(&value, 40), text]);
    }
    format!("\n{title}\n{}", table.text())
}

/// All moves, for a program.
pub fn json(moves: &[Move], mesh: &Mesh) -> serde_json::Value {
    let one = |it: &Move| {
        json!({
            "value": it.value,
            "reader": it.reader,
            "from": it.from.display(mesh).to_string(),
            "to": it.to.display(mesh).to_string(),
            "placed": it.placed,
        })
    };
    moves.iter().map(one).collect()
}
