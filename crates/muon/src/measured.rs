//! Small tables of measured values.

/// What a table of values, each from some n on and the first one for all, has for n.
pub(crate) fn at<T: Copy>(table: &[(usize, T)], n: usize) -> T {
    let found = table.iter().rfind(|(from, _)| n >= *from);
    found.expect("the first entry is for all").1
}
