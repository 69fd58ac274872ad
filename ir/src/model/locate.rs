//! Where a path such as `layers[1].body[0].attention.kv_heads` is in the source of a `model.ron`.
//!
//! Serde keeps no spans for values, so errors about meaning carry a path and this scanner finds it:
//! it knows the shape of RON (structs, lists, maps, strings, comments) and nothing of the schema.
//! Names before a `(` are transparent: `body[0].heads` looks into `TransformerLayer(heads: 4)`.
//! Overrides (`--set`) splice their value into the source at the place found here.

use std::collections::BTreeMap;
use std::ops::Range;

/// The bytes to point at for `path`; where the source leaves the field out, those of the innermost
/// value on the way that is written.
///
/// A plain value gives its own bytes, a struct or list those of its name, or of its field's name.
///
/// ```text
/// layers: [Linear(out_features: 7)]
/// layers[0].out_features  ->  7
/// layers[0]               ->  Linear
/// layers[0].bias          ->  Linear
/// layers                  ->  layers
/// ```
pub fn locate(source: &str, path: &str) -> Option<Range<usize>> {
    let path = segments(path)?;
    (0..=path.len()).rev().find_map(|n| find(source, &path[..n])).map(|it| it.head())
}

/// `source` with the value at `path` replaced, or inserted where it is absent.
pub(super) fn splice(source: &str, path: &str, value: &str) -> Result<String, String> {
    let segments = segments(path).ok_or("a path is written `a.b[0].c`")?;
    if segments.is_empty() {
        return Err("the path is empty".to_string());
    }
    check_whole(value)?;
    if let Some(found) = find(source, &segments) {
        let Range { start, end } = found.value;
        return Ok(format!("{}{value}{}", &source[..start], &source[end..]));
    }
    // Make what is missing, inside the innermost struct that is there.
    let known = (0..segments.len()).rev().find_map(|n| Some((n, find(source, &segments[..n])?)));
    let (n, parent) = known.ok_or("the model cannot be read")?;
    let mut text = value.to_string();
    for (i, segment) in segments[n..].iter().enumerate().rev() {
        let Segment::Field(name) = segment else {
            return Err(format!("`{}` has no such entry", show(&segments[..n + i])));
        };
        text = if i == 0 { format!("{name}: {text}") } else { format!("({name}: {text})") };
    }
    let open = parent.open.ok_or_else(|| format!("`{}` has no fields", show(&segments[..n])))?;
    if source.as_bytes()[open] != b'(' {
        return Err(format!("`{}` is no struct", show(&segments[..n])));
    }
    let separator = if parent.empty { "" } else { ", " };
    Ok(format!("{}{text}{separator}{}", &source[..open + 1], &source[open + 1..]))
}

/// Refuses text that is not one whole value: the rest of it would become other fields.
fn check_whole(text: &str) -> Result<(), String> {
    let mut scanner = Scanner::new(text);
    scanner.space();
    if scanner.rest().is_empty() {
        return Err("the value is empty".to_string());
    }
    if scanner.value().is_none() {
        let column = 1 + text[..scanner.at].chars().count();
        return Err(format!("the value is not complete, or has a mistake at column {column}"));
    }
    let rest = scanner.rest().trim_start();
    if rest.is_empty() {
        return Ok(());
    }
    let column = 1 + text[..text.len() - rest.len()].chars().count();
    Err(format!(
        "the value ends before column {column}, where `{rest}` follows; one `--set` sets one value"
    ))
}

/// The names of the fields of a struct: `a` and `b` of `name(a: 1, b: (c: 2))`.
pub(super) fn keys(source: &str) -> Vec<String> {
    let Some(at) = source.find('(') else { return Vec::new() };
    let key = |n: usize| {
        let item = Scanner { at, ..Scanner::new(source) }.items(|i, _| i == n)?.1?;
        item.key.map(|it| source[it].to_string())
    };
    (0..).map_while(key).collect()
}

/// The first key that a map of `source` gives twice, at its first and its second place.
pub(super) fn repeated_key(source: &str) -> Option<[Range<usize>; 2]> {
    let mut scanner = Scanner::new(source);
    scanner.start()?;
    scanner.value()?;
    scanner.repeated
}

#[derive(Debug, Clone, PartialEq)]
enum Segment {
    Field(String),
    Index(usize),
}

fn segments(path: &str) -> Option<Vec<Segment>> {
    let mut res = Vec::new();
    let mut rest = path;
    while !rest.is_empty() {
        if let Some(tail) = rest.strip_prefix('[') {
            let (index, tail) = tail.split_once(']')?;
            res.push(match index.strip_prefix('"').and_then(|it| it.strip_suffix('"')) {
                Some(key) => Segment::Field(key.to_string()),
                None => Segment::Index(index.parse().ok()?),
            });
            rest = tail;
        } else {
            rest = rest.strip_prefix('.').unwrap_or(rest);
            let end = rest.find(['.', '[']).unwrap_or(rest.len());
            if end == 0 {
                return None;
            }
            res.push(Segment::Field(rest[..end].to_string()));
            rest = &rest[end..];
        }
    }
    Some(res)
}

fn show(path: &[Segment]) -> String {
    let mut res = String::new();
    for segment in path {
        match segment {
            Segment::Field(name) if res.is_empty() => res.push_str(name),
            Segment::Field(name) => res.push_str(&format!(".{name}")),
            Segment::Index(index) => res.push_str(&format!("[{index}]")),
        }
    }
    if res.is_empty() { "the model".to_string() } else { res }
}

/// A value in the source.
struct Found {
    /// The name of its field, as written.
    key: Option<Range<usize>>,
    /// All of it.
    value: Range<usize>,
    /// The name before its `(`.
    name: Option<Range<usize>>,
    /// Where its `(`, `[` or `{` is.
    open: Option<usize>,
    /// Nothing is between its brackets.
    empty: bool,
}

impl Found {
    fn head(&self) -> Range<usize> {
        match (self.open, &self.name, &self.key) {
            (None, _, _) => self.value.clone(),
            (_, Some(name), _) => name.clone(),
            (_, _, Some(key)) => key.clone(),
            (Some(open), None, None) => open..open + 1,
        }
    }
}

fn find(source: &str, path: &[Segment]) -> Option<Found> {
    let mut scanner = Scanner::new(source);
    scanner.start()?;
    let mut found = scanner.value()?;
    for segment in path {
        scanner.at = found.open?;
        found = scanner.child(segment)?;
    }
    Some(found)
}

/// Reads RON without building anything. Returns `None` on what is not RON.
struct Scanner<'a> {
    source: &'a str,
    at: usize,
    /// The first key read that its map gives twice.
    repeated: Option<[Range<usize>; 2]>,
}

impl<'a> Scanner<'a> {
    fn new(source: &'a str) -> Scanner<'a> {
        Scanner { source, at: 0, repeated: None }
    }

    /// Skips what stands before the first value.
    fn start(&mut self) -> Option<()> {
        self.eat("\u{feff}");
        self.space();
        while self.eat("#![") {
            self.at += self.rest().find(']')? + 1;
            self.space();
        }
        Some(())
    }

    fn rest(&self) -> &str {
        &self.source[self.at..]
    }

    fn eat(&mut self, token: &str) -> bool {
        let res = self.rest().starts_with(token);
        self.at += if res { token.len() } else { 0 };
        res
    }

    /// Skips white space and comments.
    fn space(&mut self) {
        loop {
            let rest = self.rest();
            let white = rest.len() - rest.trim_start().len();
            self.at += white;
            if self.rest().starts_with("//") {
                self.at += self.rest().find('\n').unwrap_or(self.rest().len());
            } else if self.eat("/*") {
                let mut depth = 1;
                while depth > 0 && !self.rest().is_empty() {
                    if self.eat("/*") {
                        depth += 1;
                    } else if self.eat("*/") {
                        depth -= 1;
                    } else {
                        self.at += self.rest().chars().next().map_or(0, char::len_utf8);
                    }
                }
            } else if white == 0 {
                return;
            }
        }
    }

    /// Reads one value, starting at its first byte.
    fn value(&mut self) -> Option<Found> {
        let start = self.at;
        let (mut name, mut open, mut empty) = (None, None, false);
        if !self.string()? {
            self.at += self.rest().find(|it: char| !is_word(it)).unwrap_or(self.rest().len());
            let word = start..self.at;
            self.space();
            let opens = match self.rest().chars().next() {
                Some('(') => true,
                Some('[' | '{') => word.is_empty(),
                _ => false,
            };
            if opens {
                name = (!word.is_empty()).then_some(word);
                open = Some(self.at);
                empty = self.items(|_, _| false)?.0 == 0;
            } else {
                if word.is_empty() {
                    return None;
                }
                self.at = word.end;
            }
        }
        Some(Found { key: None, value: start..self.at, name, open, empty })
    }

    /// Reads a string or a character, if one is here.
    fn string(&mut self) -> Option<bool> {
        let rest = self.rest();
        let hashes = rest.strip_prefix('r').map(|it| it.len() - it.trim_start_matches('#').len());
        if let Some(n) = hashes.filter(|&it| rest[1 + it..].starts_with('"')) {
            let close = format!("\"{}", "#".repeat(n));
            self.at += n + 2;
            self.at += self.rest().find(&close)? + close.len();
            return Some(true);
        }
        let Some(quote) = rest.chars().next().filter(|it| matches!(it, '"' | '\'')) else {
            return Some(false);
        };
        let mut escaped = false;
        for (i, c) in rest.char_indices().skip(1) {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                _ if c == quote => {
                    self.at += i + 1;
                    return Some(true);
                }
                _ => (),
            }
        }
        None
    }

    /// Reads from an opening bracket past the closing one; stops early at the item that `wanted`
    /// accepts, given its index and its key. Returns how many items there were, and that item.
    fn items(
        &mut self,
        wanted: impl Fn(usize, Option<&str>) -> bool,
    ) -> Option<(usize, Option<Found>)> {
        let is_map = self.rest().starts_with('{');
        self.at += 1;
        let (mut n, mut keys) = (0, BTreeMap::new());
        loop {
            self.space();
            if self.eat(")") || self.eat("]") || self.eat("}") {
                return Some((n, None));
            }
            let mut item = self.value()?;
            let end = self.at;
            self.space();
            if self.eat(":") {
                self.space();
                let key = item.value;
                item = self.value()?;
                if is_map && self.repeated.is_none() {
                    // `1` and `0x1` are one key, as are `"a"` and `r"a"`.
                    let value: Option<ron::Value> = ron::from_str(&self.source[key.clone()]).ok();
                    let first = value.and_then(|it| keys.insert(it, key.clone()));
                    self.repeated = first.map(|it| [it, key.clone()]);
                }
                item.key = Some(key);
            } else {
                self.at = end;
            }
            let key = item.key.clone().map(|it| self.source[it].trim_matches('"'));
            if wanted(n, key) {
                return Some((n, Some(item)));
            }
            n += 1;
            self.space();
            if !self.eat(",") && !matches!(self.rest().chars().next(), Some(')' | ']' | '}')) {
                return None;
            }
        }
    }

    /// The item of the struct, list or map that opens here.
    fn child(&mut self, segment: &Segment) -> Option<Found> {
        match segment {
            Segment::Field(name) => self.items(|_, key| key == Some(name.as_str())),
            Segment::Index(index) => self.items(|n, key| match key {
                Some(key) => key == index.to_string(),
                None => n == *index,
            }),
        }?
        .1
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '+' | '-' | '#')
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r##"#![enable(implicit_some)]
// layers: [1]
Model(
    name: "a, (b", /* fsdp: ( /* nested */ */
    precision: (compute: bf16),
    layers: [
        Embedding(name: r#"x"y"#, dim: 64),
        Repeat(n: 2, body: [TransformerLayer(attention: (heads: 4, kv_heads: 3))]),
    ],
    parameters: { "a.*": (dim: -1.5e3) },
    empty: (),
)
"##;

    #[track_caller]
    fn check(path: &str, expect: &str) {
        let range = locate(SOURCE, path).expect("something to point at");
        assert_eq!(&SOURCE[range], expect, "{path}");
    }

    #[test]
    fn finds_values_by_path() {
        check("name", "\"a, (b\"");
        check("precision.compute", "bf16");
        check("layers[1].n", "2");
        check("layers[1].body[0].attention.kv_heads", "3");
        check("parameters[\"a.*\"].dim", "-1.5e3");
    }

    #[test]
    fn points_at_the_head_of_what_is_large_or_absent() {
        check("layers", "layers");
        check("layers[0]", "Embedding");
        check("layers[1].body[0]", "TransformerLayer");
        check("layers[1].body[0].attention.head_dim", "attention");
        check("precision.reduce", "precision");
        check("sequence_parallel", "Model");
        check("", "Model");
    }

    #[test]
    fn source_that_is_no_ron_has_nothing_to_point_at() {
        assert_eq!(locate("Model(name: \"a", "name"), None);
        assert_eq!(locate("", "name"), None);
    }

    #[test]
    fn finds_keys_that_a_map_gives_twice() {
        let check = |source: &str, expect: Option<[usize; 2]>| {
            let found = repeated_key(source).map(|it| it.map(|it| it.start));
            assert_eq!(found, expect, "{source}");
        };
        check("Model(a: {1: x, 2: x, 1: y})", Some([10, 22]));
        check("Model(a: [B(p: {\"tp\": S(0), r\"tp\": S(1)})])", Some([16, 28]));
        check("(a: {1: x, 0x1: y})", Some([5, 11]));
        check("\u{feff}// {1: 2, 1: 2}\n(a: {\"{1: 2, 1: 2}\": {1: x}, 1: {2: y, 1: z}})", None);
        check("(a: 1, a: 2)", None);
    }

    #[track_caller]
    fn check_splice(source: &str, path: &str, value: &str, expect: &str) {
        assert_eq!(splice(source, path, value).as_deref(), Ok(expect));
    }

    #[test]
    fn splices_values() {
        check_splice("Model(a: 1, b: 2)", "b", "3", "Model(a: 1, b: 3)");
        check_splice("Model(a: 1)", "b", "3", "Model(b: 3, a: 1)");
        check_splice("Model()", "b", "3", "Model(b: 3)");
        check_splice("(a: 1)", "p.c", "x", "(p: (c: x), a: 1)");
        check_splice("(p: (d: 1))", "p.c", "x", "(p: (c: x, d: 1))");
        check_splice("(l: [A(), B(x: 1)])", "l[0].x", "2", "(l: [A(x: 2), B(x: 1)])");
    }

    #[test]
    fn refuses_paths_that_cannot_be_made() {
        assert!(splice("(a: 1)", "l[0].x", "2").is_err());
        assert!(splice("(a: 1)", "a.x", "2").is_err());
        assert!(splice("(a: [1])", "a.x", "2").is_err());
        assert!(splice("(a: 1)", "", "2").is_err());
    }

    #[test]
    fn a_spliced_value_is_one_whole_value() {
        #[track_caller]
        fn check(value: &str, expect: &str) {
            assert_eq!(splice("(a: 1)", "a", value), Err(expect.to_string()));
        }
        let follows = |column: u8, rest: &str| {
            format!(
                "the value ends before column {column}, where `{rest}` follows; one `--set` sets one value"
            )
        };
        check("3, seed: 4", &follows(2, ", seed: 4"));
        check("3)", &follows(2, ")"));
        check("A(b: 1), B()", &follows(8, ", B()"));
        check("3 // x", &follows(3, "// x"));
        check("", "the value is empty");
        check("A(b: 1", "the value is not complete, or has a mistake at column 7");
        for value in ["-1.5e3", "\"a, b)\"", "[(1, \"x\"), ()]", "A(b: [/* ) */ 1])", "None"] {
            assert_eq!(splice("(a: 1)", "a", value), Ok(format!("(a: {value})")));
        }
    }
}
