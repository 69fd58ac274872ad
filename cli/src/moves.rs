//! What the planner moves because shardings disagree, layers folded.

use ir::graph::Move;
use ir::placement::Mesh;
use serde_json::json;

use crate::table::{Align, Table, elided};
use crate::words::fold;

/// A table of moves; those that differ in numbers of layers only are one line with a count.
pub fn table(moves: &[Move], mesh: &Mesh) -> String {
    let mut folded: Vec<(usize, [String; 4])> = Vec::new();
    for it in moves {
        let line = [
            fold(&it.value),
            it.from.display(mesh).to_string(),
            it.to.display(mesh).to_string(),
            if it.reader == it.value { String::new() } else { format!("for {}", fold(&it.reader)) },
        ];
        match folded.iter_mut().find(|it| it.1 == line) {
            Some(known) => known.0 += 1,
            None => folded.push((1, line)),
        }
    }
    let mut res = String::from("\nmoved because shardings disagree\n");
    let mut table = Table::new(2, &[Align::Right, Align::Left, Align::Left]);
    for (count, [value, from, to, reader]) in folded {
        table.row([format!("{count} x"), elided(&value, 40), format!("{from} -> {to} {reader}")]);
    }
    res.push_str(&table.text());
    res
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
