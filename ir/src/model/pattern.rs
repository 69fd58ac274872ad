//! `NamePattern`: a pattern for names of tensors, in fields of a model and flags of `planc`.
//!
//! There is one dialect, that of shells without paths:
//!
//! ```text
//! *         any text, also none; dots and slashes are text
//! ?         any one character
//! [qk]      one of these characters; [0-3] one of a range
//! [!qk]     one character that is none of these
//! { } \     these characters
//! ```
//!
//! A `[` that is meant is written `[[]`.

use std::fmt;
use std::str::FromStr;

/// A pattern that is matched against the whole name of a parameter, such as `*.norm.weight`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamePattern {
    text: String,
    pattern: glob::Pattern,
}

/// A pattern that cannot be read: its only mistake is a `[` without `]`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no `]` closes the `[` at character {column} of `{pattern}`; write `[[]` for the character `[`"
)]
pub struct PatternError {
    /// The pattern.
    pub pattern: String,
    /// The place of the `[`, in characters from 1.
    pub column: usize,
}

impl NamePattern {
    /// Returns true if the pattern matches the whole of `name`.
    pub fn matches(&self, name: &str) -> bool {
        self.pattern.matches(name)
    }

    /// Returns the pattern as the user wrote it.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for NamePattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<NamePattern, PatternError> {
        // The library knows `**` as a path of any depth. Here two stars say what one says.
        let mut kept: Vec<(usize, char)> = text.chars().enumerate().collect();
        kept.dedup_by(|b, a| a.1 == '*' && b.1 == '*');
        let pattern: String = kept.iter().map(|it| it.1).collect();
        match glob::Pattern::new(&pattern) {
            Ok(pattern) => Ok(NamePattern { text: text.to_string(), pattern }),
            Err(error) => {
                let column = kept.get(error.pos).map_or(0, |it| it.0) + 1;
                Err(PatternError { pattern: text.to_string(), column })
            }
        }
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of patterns with names that each matches and does not. The first rows use `*` alone.
    #[test]
    fn patterns_say_what_they_always_said() {
        let table: [(&str, &[&str], &[&str]); 26] = [
            ("*", &["", "a", "a.b", "a/b", ".a"], &[]),
            ("", &[""], &["a"]),
            ("a.*.weight", &["a.0.b.weight", "a..weight"], &["a.weight", "b.a.0.weight"]),
            ("*norm*", &["model.norm.weight", "norm"], &["model.nor"]),
            ("norm", &["norm"], &["model.norm", "norm.weight", "Norm"]),
            ("*.weight", &["a.weight", ".weight"], &["weight", "a.weight.full"]),
            ("a*a", &["aa", "aba"], &["a"]),
            ("*a*b", &["ab", "xaxbxb"], &["ba", "abx"]),
            ("a**b", &["ab", "a.c.b", "a/c/b"], &["a"]),
            ("**/b", &["/b", "a/b", "x.y/b"], &["b"]),
            ("***", &["", "a.b"], &[]),
            ("{a,b}", &["{a,b}"], &["a", "b"]),
            ("a\\*", &["a\\", "a\\b"], &["a*"]),
            ("a\\.b", &["a\\.b"], &["a.b"]),
            ("a?", &["ab", "a.", "aé", "a?"], &["a", "abc"]),
            ("*.[qk]_proj.*", &["a.q_proj.weight", "a.k_proj.bias"], &["a.v_proj.weight"]),
            ("*.[!qk]_proj.*", &["a.v_proj.weight"], &["a.q_proj.weight", "a._proj.weight"]),
            ("layers.[0-3].?", &["layers.2.w"], &["layers.4.w", "layers.12.w"]),
            ("[^a]", &["^", "a"], &["b"]),
            ("[a-]", &["a", "-"], &["b"]),
            ("[é-ü]?", &["éx", "öü"], &["ax"]),
            ("[[]0]", &["[0]"], &["0"]),
            ("a]", &["a]"], &["a"]),
            ("[]]", &["]"], &["["]),
            ("[a.]*", &["a", ".x.y"], &["b"]),
            ("[*?]", &["*", "?"], &["a", ""]),
        ];
        for (pattern, fits, others) in table {
            let it: NamePattern = pattern.parse().unwrap_or_else(|it| panic!("{it}"));
            assert_eq!(it.to_string(), pattern);
            fits.iter().for_each(|name| assert!(it.matches(name), "`{pattern}` and `{name}`"));
            others.iter().for_each(|name| assert!(!it.matches(name), "`{pattern}` and `{name}`"));
        }
    }

    #[test]
    fn a_bracket_that_nothing_closes_is_found() {
        for (pattern, column) in [("a[", 2), ("**x[qk", 4), ("[a].[", 5), ("[]", 1), ("é[!]", 2)] {
            let error = pattern.parse::<NamePattern>().unwrap_err();
            assert_eq!(error, PatternError { pattern: pattern.into(), column }, "{error}");
        }
    }

    /// Matching takes a time that is the product of both lengths, so this one ends.
    #[test]
    fn many_stars_take_no_time() {
        let pattern: NamePattern = format!("{}!", "*?".repeat(200)).parse().unwrap();
        assert!(!pattern.matches(&"model.layers.0.".repeat(200)));
    }
}
