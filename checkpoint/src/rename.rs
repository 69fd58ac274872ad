//! [`Renames`]: other names for keys, by globs.
//!
//! ```text
//! layers.*.attention.wq.weight=model.layers.*.self_attn.q_proj.weight
//! ```
//!
//! The first rule whose left side matches a key renames it. The patterns are those of [`NamePattern`]; each `*` of the
//! right side stands for what the `*` at its place in the left side stood for.

use std::borrow::Cow;
use std::str::FromStr;

use ir::model::NamePattern;

/// Rules that rename keys, of which the first that matches holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Renames(pub Vec<Rename>);

/// One rule: `FROM=TO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rename {
    text: String,
    whole: NamePattern,
    /// The patterns between the stars of the left side, each with the characters that it matches.
    pieces: Vec<(NamePattern, usize)>,
    /// The texts between the stars of the right side.
    to: Vec<String>,
}

impl Renames {
    /// The name of a key.
    pub fn apply<'a>(&self, key: &'a str) -> Cow<'a, str> {
        let renamed = self.0.iter().find_map(|it| it.apply(key));
        renamed.map_or(Cow::Borrowed(key), Cow::Owned)
    }
}

impl Rename {
    /// Returns true if the rule renames a key.
    pub fn matches(&self, key: &str) -> bool {
        self.whole.matches(key)
    }

    /// Returns the rule as the user wrote it.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    fn apply(&self, key: &str) -> Option<String> {
        if !self.whole.matches(key) {
            return None;
        }
        let chars: Vec<char> = key.chars().collect();
        let mut stars = Vec::new();
        let (first, rest) = self.pieces.split_first()?;
        fits(first, &chars, 0).then_some(())?;
        stars_of(rest, &chars, first.1, &mut stars).then_some(())?;
        let mut res = self.to[0].clone();
        for (star, text) in stars.iter().zip(&self.to[1..]) {
            res.push_str(star);
            res.push_str(text);
        }
        Some(res)
    }
}

/// Returns true if a pattern without stars matches the characters from `at` on, as many as the pattern has.
fn fits((pattern, len): &(NamePattern, usize), chars: &[char], at: usize) -> bool {
    let text: Option<String> = chars.get(at..at + len).map(|it| it.iter().collect());
    text.is_some_and(|it| pattern.matches(&it))
}

/// Finds what the star before each piece stands for: as little as leaves the others a match. The first place where a
/// piece matches is as good as any, but for the last, which is at the end.
fn stars_of(
    pieces: &[(NamePattern, usize)],
    chars: &[char],
    mut at: usize,
    stars: &mut Vec<String>,
) -> bool {
    for (i, piece) in pieces.iter().enumerate() {
        let last = chars.len().checked_sub(piece.1).filter(|&it| it >= at);
        let Some(last) = last else { return false };
        let first = if i + 1 == pieces.len() { last } else { at };
        let Some(found) = (first..=last).find(|&it| fits(piece, chars, it)) else { return false };
        stars.push(chars[at..found].iter().collect());
        at = found + piece.1;
    }
    at == chars.len()
}

impl FromStr for Rename {
    type Err = String;

    fn from_str(text: &str) -> Result<Rename, String> {
        let Some((from, to)) = text.split_once('=') else {
            return Err(format!("`{text}` is not FROM=TO"));
        };
        let whole: NamePattern = from.parse().map_err(|it| format!("{it}"))?;
        let mut pieces = vec![(String::new(), 0)];
        let mut chars = from.chars().peekable();
        while let Some(it) = chars.next() {
            if it == '*' {
                while chars.next_if_eq(&'*').is_some() {}
                pieces.push((String::new(), 0));
                continue;
            }
            let (piece, len) = pieces.last_mut().expect("there is one");
            piece.push(it);
            *len += 1;
            if it == '[' {
                // One character, whose set may begin with a `]`, and is closed: the whole was read.
                piece.extend(chars.next_if_eq(&'!'));
                piece.extend(chars.next());
                for it in chars.by_ref() {
                    piece.push(it);
                    if it == ']' {
                        break;
                    }
                }
            }
        }
        let to: Vec<String> = to.split('*').map(str::to_string).collect();
        if to.len() != pieces.len() {
            let (a, b) = (pieces.len() - 1, to.len() - 1);
            return Err(format!("`{text}` has {a} `*` before the `=` and {b} behind it"));
        }
        let pieces = pieces.into_iter().map(|(it, len)| {
            it.parse().map(|it| (it, len)).map_err(|it: ir::model::PatternError| it.to_string())
        });
        Ok(Rename { text: text.to_string(), whole, pieces: pieces.collect::<Result<_, _>>()?, to })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rule: &str, key: &str, expect: &str) {
        let rename: Rename = rule.parse().unwrap_or_else(|it| panic!("{it}"));
        assert_eq!(Renames(vec![rename]).apply(key), expect, "{rule}");
    }

    #[test]
    fn stars_keep_what_they_stand_for() {
        check("a=b", "a", "b");
        check("a=b", "c", "c");
        check("norm.*=model.norm.*", "norm.weight", "model.norm.weight");
        check("layers.*.wq.*=h.*.q.*", "layers.12.wq.weight", "h.12.q.weight");
        check("*=model.*", "", "model.");
        check("*.weight=*.w", "a.weight.weight", "a.weight.w");
        check("**.w?=*.v", "a.b.w1", "a.b.v");
        check("l.[0-3].*=first.*", "l.2.x", "first.x");
        check("l.[0-3].*=first.*", "l.4.x", "l.4.x");
        check("[[]*]=*", "[é]", "é");
        check("a*a=*", "a", "a");
    }

    #[test]
    fn the_first_rule_that_matches_holds() {
        let rules = ["a.*=x.*", "*=y.*"].map(|it| it.parse().unwrap_or_else(|it| panic!("{it}")));
        let renames = Renames(rules.to_vec());
        assert_eq!([renames.apply("a.b"), renames.apply("b")], ["x.b", "y.b"]);
    }

    #[test]
    fn what_is_no_rule_says_why() {
        for (text, why) in [
            ("a", "is not FROM=TO"),
            ("a.*=b", "has 1 `*` before the `=` and 0 behind it"),
            ("a[=b", "no `]` closes the `[`"),
        ] {
            let error = text.parse::<Rename>().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
