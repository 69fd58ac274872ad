//! Patterns for names.

/// Whether all of `text` fits `pattern`: `*` stands for any text, `?` for one character, `[qk]` and
/// `[0-3]` for one of these, `[!qk]` for one of all others. A `[` that is never closed is itself.
pub fn glob(pattern: &str, text: &str) -> bool {
    let mut rest = text.chars();
    let Some(first) = pattern.chars().next() else { return text.is_empty() };
    let tail = &pattern[first.len_utf8()..];
    match first {
        '*' => {
            let mut ends = text.char_indices().map(|it| it.0).chain([text.len()]);
            ends.any(|it| glob(tail, &text[it..]))
        }
        '?' => rest.next().is_some() && glob(tail, rest.as_str()),
        '[' if tail.contains(']') => {
            let Some((class, tail)) = tail.split_once(']') else { return false };
            rest.next().is_some_and(|it| in_class(class, it)) && glob(tail, rest.as_str())
        }
        _ => rest.next() == Some(first) && glob(tail, rest.as_str()),
    }
}

/// Whether `c` is in the class `qk`, `0-3` or `!qk`.
fn in_class(class: &str, c: char) -> bool {
    if let Some(others) = class.strip_prefix('!') {
        return !in_class(others, c);
    }
    let chars: Vec<char> = class.chars().collect();
    let in_range = chars.windows(3).any(|it| it[1] == '-' && (it[0]..=it[2]).contains(&c));
    in_range || chars.contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_have_classes() {
        assert!(glob("*.[qk]_proj.*", "a.q_proj.weight"));
        assert!(!glob("*.[qk]_proj.*", "a.v_proj.weight"));
        assert!(glob("*.[!qk]_proj.*", "a.v_proj.weight"));
        assert!(glob("layers.[0-3].?", "layers.2.w"));
        assert!(!glob("layers.[0-3].?", "layers.4.w"));
        assert!(!glob("a?", "a"));
        assert!(glob("a[", "a["));
    }
}
